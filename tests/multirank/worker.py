"""Runs every scenario of a module on this rank: worker.py MODULE FOLDER SECONDS; one JSON line a scenario."""

import faulthandler
import importlib.util
import json
import sys
import traceback
from pathlib import Path

import hvdplus

module_path, folder, seconds = sys.argv[1:4]
faulthandler.enable()
faulthandler.dump_traceback_later(float(seconds), exit=True)  # a hang ends here, with every thread's stack

spec = importlib.util.spec_from_file_location("scenarios", module_path)
module = importlib.util.module_from_spec(spec)
sys.path.insert(0, str(Path(module_path).parent))
spec.loader.exec_module(module)

rank = hvdplus.discover().rank
with open(Path(folder) / f"rank{rank}.jsonl", "w") as out:
    for name in [name for name in vars(module) if name.startswith("scenario_")]:
        print(f"[{rank}] {name}", flush=True)
        entry = {"name": name}
        try:
            entry["result"] = getattr(module, name)()
        except Exception:
            entry["error"] = traceback.format_exc()
            print(entry["error"], flush=True)
        out.write(json.dumps(entry) + "\n")
        out.flush()
