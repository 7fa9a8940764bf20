"""`python -m traincast` is the command line."""

import sys

from traincast.app.cli.main import main

sys.exit(main())
