"""quire train-draft: trains a draft head for a model, with nothing but the model. Start at `run.py`. It needs torch."""
