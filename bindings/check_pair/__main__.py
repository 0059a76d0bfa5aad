"""The command: python -m draft_verify.check_pair TARGET DRAFT.

TARGET and DRAFT are Hugging Face model folders (config.json, and tokenizer.json, generation_config.json where there
are any) or config.json files. Exits 1 where the pair cannot work, 2 where a file cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys

from draft_verify.check_pair import check_pair


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m draft_verify.check_pair", description="Says whether a draft model can serve a target model."
    )
    parser.add_argument("target", help="Hugging Face model folder or config.json of the target")
    parser.add_argument("draft", help="the same of the draft: a small model, or EAGLE or Medusa heads")
    parser.add_argument("--num-draft-tokens", type=int, metavar="K", help="drafts a step")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(arguments)
    try:
        report = check_pair(options.target, options.draft, num_draft_tokens=options.num_draft_tokens)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
