"""Ask a served model, and collect its answers, corrected where needed, for train.py.

python collect.py http://127.0.0.1:8080 "10 plus 3 is" "12 plus 6 is"
"""

import argparse
import json
import urllib.request


def ask(url, prompt):
    """The model's answer to a prompt, as the server gives it."""
    body = json.dumps({"inputs": prompt, "parameters": {"return_full_text": False}}).encode()
    request = urllib.request.Request(
        f"{url}/invocations", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["outputs"][0]["generated_text"].strip()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--output", default="answers.jsonl")
    given = parser.parse_args()
    with open(given.output, "a") as file:
        for prompt in given.prompts:
            answer = ask(given.url, prompt)
            correct = input(f"{prompt} {answer}   [Enter if right, or the correct answer] ")
            collected = {"prompt": prompt, "completion": f" {correct.strip() or answer}"}
            file.write(json.dumps(collected) + "\n")


if __name__ == "__main__":
    main()
