"""Writes workload.jsonl: make_workload.py FOLDER, for the workloads A, B and C of the benchmark.

Rows {wl, i, ids, max_tokens}; ids are SmolLM2 token ids. Seeded; the texts are docstrings of the standard
library, so another Python version gives other rows: figures refer to the committed workload.jsonl.
"""

import ast
import json
import random
import re
import sys
import sysconfig
from pathlib import Path

from transformers import AutoTokenizer

SEED = 20261129
SYSTEM = """You are a support-ticket triage assistant in a nightly data pipeline. Read the text and return \
one JSON object with these keys: "category" (one of: networking, storage, security, concurrency, parsing, \
user-interface, other), "severity" (an integer from 1 to 5), "component" (the name of the module or \
class that the text is about, or null), "summary" (one plain English sentence of at most twenty words), \
and "actions" (a list of at most three short imperative phrases). Do not add any other key. Do not \
explain your answer. If the text is not about software, use the category "other" and severity 1. Keep \
names exactly as they are written in the text. Never invent a version number, a date or a person.

Example 1
Text: The connection pool raises TimeoutError when more than fifty sockets are open at the same time, \
and the worker is restarted by the supervisor.
Answer: {"category": "networking", "severity": 4, "component": "connection pool", "summary": "The pool \
times out when over fifty sockets are open.", "actions": ["raise the pool limit", "add a retry with \
backoff"]}

Example 2
Text: Return a copy of the string with leading whitespace removed. If chars is given and not None, \
remove characters in chars instead.
Answer: {"category": "parsing", "severity": 1, "component": null, "summary": "Strips leading whitespace \
or the given characters from a string.", "actions": []}

Example 3
Text: Acquire a lock, blocking or non-blocking. When invoked with blocking set to False, do not block; \
two threads that call it at once can deadlock in the finalizer.
Answer: {"category": "concurrency", "severity": 5, "component": "lock", "summary": "Two threads can \
deadlock when they take the lock in a finalizer.", "actions": ["remove the lock from the finalizer", \
"add a timeout"]}

Now do the same for the next text."""


def load_paragraphs() -> list[str]:
    """Every docstring of the standard library's top modules over 60 characters, each in one line."""
    paragraphs = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node)
                if text and len(text) > 60:
                    paragraphs.append(re.sub(r"\s+", " ", text))
    return sorted(paragraphs)


def build_rows(tokenizer) -> list[dict]:
    """The rows of all three workloads; the order of the random draws is part of the format."""
    rng = random.Random(SEED)
    paragraphs = load_paragraphs()
    rng.shuffle(paragraphs)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    stream = iter(encode("\n".join(paragraphs)))

    def take(num_tokens: int) -> list[int]:
        return [next(stream) for _ in range(num_tokens)]

    head = encode("<|im_start|>user\n")
    prefix = encode("<|im_start|>system\n" + SYSTEM + "<|im_end|>\n<|im_start|>user\nText: ")
    suffix = encode("<|im_end|>\n<|im_start|>assistant\n")
    question = encode("\nExplain the text above.")
    rows = []
    for i in range(256):
        rows.append(
            {"wl": "A", "i": i, "ids": prefix + take(rng.randint(20, 200)) + suffix, "max_tokens": 64}
        )
    for i in range(64):
        num_own = rng.randint(50, 400) - len(head) - len(question) - len(suffix)
        ids = head + take(num_own) + question + suffix
        rows.append({"wl": "B", "i": i, "ids": ids, "max_tokens": rng.randint(8, 256)})
    single = encode("<|im_start|>user\nExplain how a hash table works, and when to use one.") + suffix
    return [*rows, {"wl": "C", "i": 0, "ids": single, "max_tokens": 128}]


def main() -> None:
    """Build, write and count. FOLDER holds smollm2-hf/ (prepare_model.py) and receives workload.jsonl."""
    folder = Path(sys.argv[1])
    rows = build_rows(AutoTokenizer.from_pretrained(folder / "smollm2-hf"))
    with open(folder / "workload.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    for workload in "ABC":
        sizes = [(len(row["ids"]), row["max_tokens"]) for row in rows if row["wl"] == workload]
        num_prompt, num_out = (sum(column) for column in zip(*sizes, strict=True))
        print(f"{workload}: {len(sizes)} rows, {num_prompt} prompt tokens, {num_out} output tokens")


if __name__ == "__main__":
    main()
