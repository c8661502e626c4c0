"""rlk-replay whose last rank is given another directory: ``CAPTURE OTHER ARGUMENTS...``."""

import os
import sys

from rlk_adapters.replay import main

capture, other, *arguments = sys.argv[1:]
is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
sys.exit(main(["--capture", other if is_last else capture, *arguments]))
