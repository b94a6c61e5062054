"""Send the same request to `ssd-engine serve` three times with OpenAI's client.

    ssd-engine serve --port 8000 &
    pip install openai
    python examples/openai_client.py [http://127.0.0.1:8000/v1]

Prints the text as it is streamed, then tokens per step of two further answers. They are drafted from the first one, so
there are more than the one of plain decoding.
"""

import sys

import openai


def main(url="http://127.0.0.1:8000/v1"):
    client = openai.OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    request = {"model": model, "prompt": "def quicksort(items):", "max_tokens": 64, "temperature": 0}
    for chunk in client.completions.create(**request, stream=True):
        print(chunk.choices[0].text, end="", flush=True)
    print()
    for _ in range(2):
        usage = client.completions.create(**request).usage
        # `draft` is a field that OpenAI's API does not have; the client keeps it.
        print(f"{usage.completion_tokens} tokens, {usage.draft['tokens_per_step']:.1f} per step")


if __name__ == "__main__":
    main(*sys.argv[1:])
