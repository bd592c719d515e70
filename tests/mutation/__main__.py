"""``python -m tests.mutation`` from a checkout."""

import sys
from pathlib import Path

# The tests' own modules are imported by their plain names, as pytest does.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mutation.run import main

sys.exit(main(sys.argv[1:]))
