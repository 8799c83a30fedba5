"""The simulated driver itself: the rules that the other tests rely on hold in it."""

from __future__ import annotations

from simulated_gpu import SimulatedMachine

#: ``call`` of a driver function that has to succeed, and the functions for tests of the simulated driver.
PRELUDE = """
import ctypes, sys, time
from cuda.bindings import driver
lib = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    status, *values = getattr(driver, name)(*arguments)
    assert int(status) == 0, (name, status)
    return values[0] if len(values) == 1 else values
def status(name, *arguments):
    return int(getattr(driver, name)(*arguments)[0])
def begin(ordinal=0):
    call("cuInit", 0)
    context = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal))
    call("cuCtxSetCurrent", context)
    return context
def read(pointer, size):
    data = bytearray(size)
    call("cuMemcpyDtoH", data, pointer, size)
    return bytes(data)
def delay(stream, ms):
    assert lib.simDelay(ctypes.c_void_p(int(stream)), int(ms * 1000)) == 0
def handle_bytes(handle):
    return ctypes.string_at(handle.getPtr(), 64)
def handle_of(data):
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), data, 64)
    return handle
"""

EXPORTER = (
    PRELUDE
    + """
begin()
block = call("cuMemAlloc", 4096)
call("cuMemsetD8", block, 5, 4096)
call("cuCtxSynchronize")
print(handle_bytes(call("cuIpcGetMemHandle", block)).hex(), flush=True)
for line in sys.stdin:
    if line.strip() == "read":
        print(read(block, 1)[0], flush=True)
    else:
        call("cuMemFree", block)
        block = call("cuMemAlloc", 4096)
        print(handle_bytes(call("cuIpcGetMemHandle", block)).hex(), flush=True)
"""
)


def test_visible_devices_are_listed_permuted_hidden_and_named_by_uuid(machine: SimulatedMachine) -> None:
    script = (
        PRELUDE
        + """
if status("cuInit", 0) == 100:
    print("none")
    sys.exit()
for ordinal in range(call("cuDeviceGetCount")):
    print(call("cuDeviceGetUuid", ordinal).bytes[:1].hex(), end=" ")
"""
    )
    three = {"SIM_CUDA_DEVICES": "3"}
    first = "GPU-11121314-1516-1718-191a-1b1c1d1e1f20"
    seen = {
        visible: machine.run(script, **three, CUDA_VISIBLE_DEVICES=visible)[0].split()
        for visible in ("2,0", "1,7,0", "-1", f"1,{first}", "GPU-33", "")
    }
    assert machine.run(script, **three)[0].split() == ["11", "22", "33"]
    assert seen == {
        "2,0": ["33", "11"],
        "1,7,0": ["22"],
        "-1": ["none"],
        f"1,{first}": ["22", "11"],
        "GPU-33": ["33"],
        "": ["none"],
    }


def test_contexts_are_per_thread(machine: SimulatedMachine) -> None:
    script = (
        PRELUDE
        + """
import threading
begin()
thread = threading.Thread(target=lambda: print(status("cuMemAlloc", 16)))
thread.start(); thread.join()
print(status("cuMemAlloc", 16))
"""
    )
    assert machine.run(script) == ["201", "0"]


def test_what_is_queued_is_done_later_and_events_tell_when(machine: SimulatedMachine) -> None:
    script = (
        PRELUDE
        + """
context = begin()
block = call("cuMemAlloc", 16)
call("cuMemsetD8", block, 1, 16); call("cuCtxSynchronize")
stream, other = call("cuStreamCreate", 1), call("cuStreamCreate", 1)
event, whole, elsewhere = (call("cuEventCreate", 2) for _ in range(3))
delay(stream, 300)
call("cuMemsetD8Async", block, 9, 16, stream)
call("cuEventRecord", event, stream)
call("cuEventRecord", elsewhere, other)
call("cuCtxRecordEvent", context, whole)
print(*(status("cuEventQuery", asked) for asked in (event, whole, elsewhere)), read(block, 1)[0])
call("cuEventSynchronize", event)
print(status("cuEventQuery", event), status("cuEventQuery", whole), read(block, 1)[0])
"""
    )
    assert machine.run(script) == ["600 600 0 1", "0 0 9"]


def test_the_null_stream_waits_for_blocking_streams_only(machine: SimulatedMachine) -> None:
    script = (
        PRELUDE
        + """
begin()
event = call("cuEventCreate", 2)
for flags in (0, 1):
    stream = call("cuStreamCreate", flags)
    delay(stream, 200)
    call("cuEventRecord", event, 0)
    print(status("cuEventQuery", event))
    call("cuStreamSynchronize", stream)
"""
    )
    assert machine.run(script) == ["600", "0"]


def test_an_import_is_the_same_memory_and_counts_how_often_it_was_opened(machine: SimulatedMachine) -> None:
    exporter = machine.start(EXPORTER)
    script = (
        PRELUDE
        + """
begin()
handle = handle_of(bytes.fromhex(sys.argv[1]))
first, second = call("cuIpcOpenMemHandle", handle, 1), call("cuIpcOpenMemHandle", handle, 1)
print(int(first) == int(second), read(first, 1)[0])
call("cuIpcCloseMemHandle", first)
call("cuMemsetD8", second, 6, 4096); call("cuCtxSynchronize")
call("cuIpcCloseMemHandle", second)
print(status("cuIpcCloseMemHandle", second), lib.simOpenMappings())
"""
    )
    assert machine.run(script, exporter.hear()) == ["True 5", "1 0"]
    exporter.say("read")
    assert exporter.hear() == "6"


def test_the_exporting_process_and_one_with_its_pid_get_201(machine: SimulatedMachine) -> None:
    exporter = machine.start(EXPORTER)
    handle = exporter.hear()
    script = (
        PRELUDE
        + """
begin()
print(status("cuIpcOpenMemHandle", handle_of(bytes.fromhex(sys.argv[1])), 1))
own = call("cuIpcGetMemHandle", call("cuMemAlloc", 16))
print(status("cuIpcOpenMemHandle", own, 1))
"""
    )
    assert machine.run(script, handle, SIM_CUDA_SAME_PID="1") == ["201", "201"]
    assert machine.run(script, handle) == ["0", "201"]
    assert machine.run(script, handle, CUDA_VISIBLE_DEVICES="1") == ["101", "201"]


def test_handle_bytes_repeat_after_a_free(machine: SimulatedMachine) -> None:
    exporter = machine.start(EXPORTER)
    before = exporter.hear()
    exporter.say("again")
    assert exporter.hear() == before


def test_memory_outlives_its_exporter_where_it_is_mapped_or_is_gone(machine: SimulatedMachine) -> None:
    script = (
        PRELUDE
        + """
begin()
block = call("cuIpcOpenMemHandle", handle_of(bytes.fromhex(sys.argv[1])), 1)
print(read(block, 1)[0], lib.simAllocated(0), flush=True)
sys.stdin.readline()
print(read(block, 1)[0], lib.simAllocated(0), flush=True)
call("cuMemsetD8", block, 1, 1)
print(status("cuCtxSynchronize"), flush=True)
"""
    )
    for gone, then in (("pin", ["5 4096", "0"]), ("unmap", ["221 0", "700"])):
        exporter = machine.start(EXPORTER)
        importer = machine.start(script, exporter.hear(), SIM_CUDA_EXPORTER_GONE=gone)
        assert importer.hear() == "5 4096"
        exporter.close()
        importer.say("go on")
        assert importer.rest() == then


def test_memory_runs_out_and_comes_back_with_a_kill(machine: SimulatedMachine) -> None:
    script = (
        PRELUDE
        + """
begin()
print(status("cuMemAlloc", 3 << 20), status("cuMemAlloc", 2 << 20), call("cuMemGetInfo")[0], flush=True)
sys.stdin.readline()
"""
    )
    for _ in range(2):
        child = machine.start(script, SIM_CUDA_MEMORY_MIB="4")
        assert child.hear() == f"0 2 {1 << 20}"
        child.close()


def test_errors_are_injected_from_a_call_on_and_waiting_calls_are_counted(machine: SimulatedMachine) -> None:
    script = (
        PRELUDE
        + """
begin()
block = call("cuMemAlloc", 16)
before = lib.simSynchronisingCalls()
print(*(status("cuMemsetD8Async", block, 0, 16, 0) for _ in range(3)), lib.simSynchronisingCalls() - before)
call("cuCtxSynchronize")
print(lib.simSynchronisingCalls() - before, lib.simCalls(b"cuMemsetD8Async"))
"""
    )
    assert machine.run(script, SIM_CUDA_FAULTS="cuMemsetD8Async:700:3") == ["0 0 700 0", "1 3"]


def test_a_call_that_is_unsafe_under_capture_ends_the_capture_unless_its_thread_is_relaxed(
    machine: SimulatedMachine,
) -> None:
    script = (
        PRELUDE
        + """
import threading
context = begin()
stream, event = call("cuStreamCreate", 1), call("cuEventCreate", 2)
def capture(inside, relaxed):
    call("cuStreamBeginCapture", stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
    def run():
        call("cuCtxSetCurrent", context)
        if relaxed:
            call("cuThreadExchangeStreamCaptureMode", driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        inside()
    thread = threading.Thread(target=run); thread.start(); thread.join()
    return status("cuStreamEndCapture", stream)
print(capture(lambda: status("cuEventQuery", event), False), capture(lambda: status("cuEventQuery", event), True))
print(capture(lambda: status("cuCtxRecordEvent", context, event), True))
print(capture(lambda: status("cuStreamIsCapturing", stream), False))
"""
    )
    assert machine.run(script) == ["901 0", "901", "0"]


def test_an_old_driver_has_no_event_on_a_whole_context(machine: SimulatedMachine) -> None:
    script = (
        PRELUDE
        + """
context = begin()
try:
    print(status("cuCtxRecordEvent", context, call("cuEventCreate", 2)))
except RuntimeError as error:
    print(error)
"""
    )
    assert machine.run(script) == ["0"]
    assert "cuCtxRecordEvent" in machine.run(script, SIM_CUDA_VERSION="12040")[0]
