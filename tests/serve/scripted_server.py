"""A server process around a scripted model: python scripted_server.py SECONDS_PER_STEP DRAIN_SECONDS [FAIL_AFTER].

It prints the usual lines with the address and says "Hello there!", a byte a step. With "load" as SECONDS_PER_STEP it
never gets past loading.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

from neoserve.api.server import Loaded, ServerOptions, configure_logging, serve
from neoserve.engine.fake import FakeFaults

# Tests import the harness as a sibling; a script has no package, so it loads the file by its path.
_SPEC = importlib.util.spec_from_file_location("api_harness", Path(__file__).with_name("api_harness.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
harness = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(harness)


def main() -> int:
    pace, drain, *rest = sys.argv[1:]

    def load() -> Loaded:
        if pace == "load":
            time.sleep(600)
        faults = FakeFaults(fail_after_tokens=int(rest[0]) if rest else None)
        script = harness.SCRIPT + "." * 100
        server = harness.Server(script, seconds_per_step=float(pace), faults=faults, attach=False)
        return Loaded(server.model, server.engine, "a scripted model")

    configure_logging("warning")
    return serve(load, ServerOptions(port=0, drain_seconds=float(drain)))


sys.exit(main())
