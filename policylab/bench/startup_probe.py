"""Measures one fresh process up to its first token; prints the seconds of each phase as JSON.

python -m policylab.bench.startup_probe '{"model": "..."}' <prompt length>
"""

import time

start = time.perf_counter()

import json  # noqa: E402  (importing is what is measured)
import sys  # noqa: E402

from engine.config.args import EngineArgs  # noqa: E402
from engine.llm_engine import LLMEngine  # noqa: E402
from engine.messages.params import SamplingParams  # noqa: E402

imported = time.perf_counter()


def main() -> None:
    args = EngineArgs(**{"log_level": "error", **json.loads(sys.argv[1])})
    with LLMEngine.from_engine_args(args) as engine:
        loaded = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.add_request("0", [1] * int(sys.argv[2]), params)
        while engine.has_unfinished_requests():
            engine.step()
        first_token = time.perf_counter()
    phases = {
        "import_seconds": imported - start,
        "load_seconds": loaded - imported,
        "first_token_seconds": first_token - start,
    }
    print(json.dumps(phases))


if __name__ == "__main__":
    main()
