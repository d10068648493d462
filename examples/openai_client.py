"""OpenAI's client against a quire server: an answer at once, and one as a stream.

quire serve &
python examples/openai_client.py [URL]
"""

import os
import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("QUIRE_URL", "http://127.0.0.1:8000")
QUESTION = {"role": "user", "content": "Name three colours of the rainbow."}


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("QUIRE_API_KEY", "none"))
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=[QUESTION], max_tokens=32, seed=1)
    print(whole.choices[0].message.content)
    print(f"({whole.usage.prompt_tokens} + {whole.usage.completion_tokens} tokens)")
    for chunk in client.chat.completions.create(model=model, messages=[QUESTION], max_tokens=32, seed=1, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
