"""SGLang's adapter on a GPU: the scheduler's streams, with objects of their shape. SGLang itself is not run."""

from __future__ import annotations

import pytest
from gpu_pools import GpuPool

#: What is in SGLang's modules of these names, as far as the adapter knows it (``tests/peers/test_sglang_streams.py``).
SGLANG = """
import types
from mambapool.client.sglang import MambaSlotAllocator
from mambapool.client.sglang.streams import name_streams_at_start
os.environ["MAMBAPOOL_DIR"] = directory
gpu = Gpu()
class Stream:
    "torch.cuda.Stream: its handle."
    def __init__(self):
        self.cuda_stream = int(gpu.stream())
def scheduler(*, hicache):
    made = types.SimpleNamespace(schedule_stream=Stream(), forward_stream=Stream(), copy_stream=Stream())
    engine = types.SimpleNamespace(device_to_host_stream=Stream(), host_to_device_stream=Stream())
    controller = types.SimpleNamespace(l2_transfer_engine=engine) if hicache else None
    made.tree_cache = types.SimpleNamespace(cache_controller=controller)
    return made
module = types.ModuleType("sglang.srt.managers.scheduler")
module.dispatch_event_loop = lambda scheduler: ["ran", scheduler]
name_streams_at_start(module)
name_streams_at_start(module)  # installed twice
def streams_of(allocator):
    return [int(stream) for stream in allocator._worker.fences._streams]
"""


def test_the_schedulers_and_hicaches_streams_are_named_when_its_loop_starts(gpu_pool: GpuPool) -> None:
    script = (
        SGLANG
        + """
first = MambaSlotAllocator(size=4, device="cuda")
say(streams_of(first))
for hicache in (False, True):
    made = scheduler(hicache=hicache)
    say(module.dispatch_event_loop(made) == ["ran", made])
    engine = made.tree_cache.cache_controller and made.tree_cache.cache_controller.l2_transfer_engine
    expected = [made.schedule_stream, made.forward_stream, made.copy_stream]
    expected += [engine.device_to_host_stream, engine.host_to_device_stream] if hicache else []
    later = MambaSlotAllocator(size=2, device="cuda")
    say([stream.cuda_stream for stream in expected] == streams_of(first) == streams_of(later))
made.copy_stream = made.forward_stream  # one stream for both
module.dispatch_event_loop(made)
say(len(streams_of(first)))
module.dispatch_event_loop(types.SimpleNamespace(schedule_stream=None))  # not on CUDA: as it was
say(len(streams_of(first)))
"""
    )
    assert gpu_pool.run(script) == ["[]", *["True"] * 4, "4", "4"]


@pytest.mark.parametrize("stream", ["forward_stream", "host_to_device_stream", "stray"])
def test_what_a_scheduler_held_is_free_when_its_own_streams_are_done(gpu_pool: GpuPool, stream: str) -> None:
    """Of others nothing is known: they do not hold it up."""
    script = (
        SGLANG
        + """
allocator = MambaSlotAllocator(size=4, device="cuda")
made = scheduler(hicache=True)
module.dispatch_event_loop(made)
engine = made.tree_cache.cache_controller.l2_transfer_engine
slow = getattr(made, sys.argv[2], None) or getattr(engine, sys.argv[2], None) or Stream()
allocator.free(allocator.alloc(1))
gpu.delay(slow.cuda_stream, 0.4)
started = time.monotonic()
allocator._worker.close()
say(time.monotonic() - started > 0.3)
"""
    )
    assert gpu_pool.run(script, stream) == [str(stream != "stray")]
