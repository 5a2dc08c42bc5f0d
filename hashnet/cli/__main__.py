"""``python -m hashnet.cli``."""

import sys

from hashnet.cli.entry import main

sys.exit(main())
