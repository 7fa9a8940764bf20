"""`python -m traincast` is the command line."""

import sys

from traincast.cli.main import main

sys.exit(main())
