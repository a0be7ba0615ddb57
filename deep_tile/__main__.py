"""`python -m deep_tile`: the same as the `deep-tile` command."""

import sys

from deep_tile.tools.cli import main

sys.exit(main())
