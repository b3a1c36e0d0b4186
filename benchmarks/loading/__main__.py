"""A fresh process that measures or tries one loader: `python -m loading REQUEST`, JSON in and out.

It imports nothing but that loader, whose memory is measured.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from loading.arms import ARMS
from loading.gates import gates
from loading.measuring import measure

request = json.loads(sys.argv[1])
work = {"rate": measure, "gates": gates}[request.pop("what")]
arm, folder = ARMS[request.pop("arm")], Path(request.pop("folder"))
print("\n" + json.dumps(work(arm, folder, **request)), flush=True)
os._exit(0)  # ends the workers of a loader that has no end
