"""``python -m neoserve``: the same as the ``neoserve`` command."""

import sys

from neoserve.cli.main import main

sys.exit(main())
