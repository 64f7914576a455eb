"""What `doctor --explain` says of public error texts, compared with the cause that each thread settled on.

    python benchmarks/error_texts.py --write

An answer is right if its row is one of those that have the thread's cause, a meaning if the row says truly what the
message means and doesn't name that cause, wrong if it is another, and silent if the table knows nothing of the text.
`data/error_texts.json` says how the texts were collected.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import results

from accel_fsdp.launch.doctor import known_errors

DATA = Path(__file__).parent / "data" / "error_texts.json"
VERDICTS = ("right", "meaning", "wrong", "silent")


def main() -> None:
    """Prints the table, or writes it into RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    lines = list(report(json.loads(DATA.read_text())))
    print(*lines, sep="\n")
    if parser.parse_args().write:
        results.keep("error-texts", lines)


def verdict(text: dict[str, Any]) -> str:
    """One of `VERDICTS`."""
    row = known_errors.find(text["text"])
    if row is None:
        return "silent"
    if row in text["rows"]:
        return "right"
    return "meaning" if row in text.get("meant", ()) else "wrong"


def counts(texts: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """How many texts of each part got which verdict."""
    parts: dict[str, Counter[str]] = {}
    for text in texts:
        parts.setdefault(text["part"], Counter())[verdict(text)] += 1
    return parts


def report(data: dict[str, Any]) -> Iterator[str]:
    """The part of RESULTS.md."""
    yield from ("## Error messages of public reports", "", "`python benchmarks/error_texts.py --write`", "")
    yield from (f"| texts | n | table | {' | '.join(VERDICTS)} |", "|---" * (3 + len(VERDICTS)) + "|")
    for part, now in counts(data["texts"]).items():
        earlier = data["parts"][part]
        for key, name in {"before": "before it was rewritten", "first_sight": "at first sight"}.items():
            if key in earlier:
                yield _line(part, name, earlier[key])
        yield _line(part, "today's", now)
    yield from ("", data["about"], "", "Neither right nor silent today:", "")
    for text in data["texts"]:
        if verdict(text) in {"meaning", "wrong"}:
            row = known_errors.find(text["text"])
            yield f"- {text['part']}, {text['source']}: {verdict(text)}, says {row}; {text['cause']}"


def _line(part: str, table: str, verdicts: dict[str, int]) -> str:
    total = sum(verdicts.values())
    cells = [f"{verdicts.get(name, 0)} ({verdicts.get(name, 0) / total:.1%})" for name in VERDICTS]
    return f"| {part} | {total} | {table} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
