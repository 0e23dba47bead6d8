"""`python -m fxmask`."""

import sys

from .cli import main

sys.exit(main())
