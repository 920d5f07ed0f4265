"""One thin file per command: parse, compose, call. `python -m recipes.NAME --help` explains each."""

import lit_gpt_loop  # noqa: F401  first of all imports: it refuses Lightning's compromised releases
