"""A member of a search that is nothing but its reports, epoch by epoch: `--quality` is its accuracy, all the time."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import ganger

parser = argparse.ArgumentParser()
parser.add_argument("--quality", type=float, required=True)
parser.add_argument("--stop-file", type=Path, required=True, help="ends once this file is there")
options = parser.parse_args()

print(json.loads(os.environ["GANGER_ARRAY_PARAMETERS"]), flush=True)
epoch = 0
while not options.stop_file.exists():
    epoch += 1
    ganger.report(accuracy=options.quality, epoch=epoch)
    time.sleep(0.2)
