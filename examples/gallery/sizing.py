"""Sizing from a trace: which pool reuses how much of this traffic?

kvgraft-full, kvgraft-swa, kvgraft-density, kvgraft-replay. The command `kvgraft plan` does the same
in bytes, for a model's `config.json`, and draws it.
"""

from kvgraft_replay.payload import Verify
from kvgraft_replay.replay import ReplaySettings, replay
from kvgraft_replay.synthetic import synthetic_workload

# or `kvgraft_replay.detect.open_workload("trace.jsonl.gz")`
workload = synthetic_workload("chat", requests=300, seed=0)

print("tokens    reused")
for tokens in 50_000, 100_000, 200_000:
    cache = {"components": {"full": {}, "swa": {"window": 1024}}, "device_tokens": tokens}
    result = replay(workload, ReplaySettings(cache, verify=Verify.OFF))
    print(f"{tokens:7,}   {result['token_hit_rate']:6.1%}")
