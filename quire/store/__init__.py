"""The model store: from the name of a model to files on this machine. Start at `models.py`. Loads no torch."""

from quire.store.aliases import ALIASES
from quire.store.disk import Progress
from quire.store.heads import STORED, find_head, head_directory
from quire.store.models import ListedModel, ModelFiles, list_models, pull, resolve, verify

__all__ = [
    "ALIASES", "STORED", "ListedModel", "ModelFiles", "Progress", "find_head", "head_directory", "list_models", "pull",
    "resolve", "verify",
]  # fmt: skip
