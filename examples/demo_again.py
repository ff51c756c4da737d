"""The demonstration's second process: it knows nothing but the store and the prompts.

Reads one JSON object from its standard input, prompts by architecture; writes a line of JSON for
each architecture.
"""

from __future__ import annotations

import json
import sys

import torch
import transformers
from demo_conversations import SHOWS, talk_again


def main() -> int:
    (storage,) = sys.argv[1:]
    prompts = json.load(sys.stdin)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for show in SHOWS:
        if show.family in prompts:
            said = talk_again(show, storage, prompts[show.family])
            sys.stdout.write(json.dumps(said._asdict()) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
