"""Tool calling with OpenAI's client: the model asks for the weather, we look it up, the model answers.

quire serve &
python examples/tool_calling.py [URL]
"""

import json
import os
import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("QUIRE_URL", "http://127.0.0.1:8000")
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather now", "parameters": CITY}}

client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("QUIRE_API_KEY", "none"))
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the weather like in Paris?"}]
options = {"model": model, "tools": [TOOL], "parallel_tool_calls": False, "temperature": 0, "max_tokens": 64}
asked = client.chat.completions.create(messages=messages, tool_choice="required", **options).choices[0].message
messages.append(asked.model_dump(exclude_none=True))
for call in asked.tool_calls:
    city = json.loads(call.function.arguments)["city"]
    print(f"{call.function.name}({city})")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"Sunny and 22 degrees in {city}."})
answer = client.chat.completions.create(messages=messages, tool_choice="none", **options).choices[0].message
print(answer.content)
