"""Makes `python -m kvrouter` the same as `kvrouter`."""

import sys

from kvrouter.cli import main

sys.exit(main())
