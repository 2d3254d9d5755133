"""Environment variables set by a shell, a launcher or a scheduler are read, or refused in one line."""

import os
import socket

import pytest

from qat_lora.backend import count_workers, detect
from qat_lora.backend.detect import is_slice_host
from qat_lora.backend.opening import launch
from qat_lora.errors import UserError
from qat_lora.hosts.environment import LAUNCH, REQUIRED, TorchrunPlace, master_port, read_place, slice_hosts

ONE_HOST = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
HOSTS = ONE_HOST | {"MASTER_ADDR": "192.0.2.7"}


@pytest.fixture
def place(monkeypatch):
    """place({name: value}): read_place() in that environment."""

    def read(values: dict) -> TorchrunPlace | None:
        for name in (*LAUNCH, "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        return read_place()

    return read


def test_an_address_and_a_port_alone_do_not_mean_a_launcher(place):
    assert place({"MASTER_ADDR": "a", "MASTER_PORT": "29500"}) is None


def test_a_bad_port_is_refused_without_a_launcher(place):
    with pytest.raises(UserError, match=r"^MASTER_PORT=x is not a whole number .*, or unset MASTER_PORT$"):
        place({"MASTER_PORT": "x"})


@pytest.mark.parametrize(
    "values, wanted",  # rank, world_size, local_rank, local_world_size
    [
        (ONE_HOST, (1, 2, 1, 2)),
        (ONE_HOST | {"MASTER_ADDR": "localhost", "RANK": " 0 "}, (0, 2, 0, 2)),
        (HOSTS, (1, 2, 0, 1)),
        (HOSTS | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (5, 8, 1, 4)),
        (HOSTS | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (3, 4, 1, 2)),
        (HOSTS | {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, (3, 8, 3, 4)),
        (HOSTS | {"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1)),
    ],
)
def test_a_place_is_read_and_missing_values_are_derived(place, values, wanted):
    read = place(values)
    assert (read.rank, read.world_size, read.local_rank, read.local_world_size) == wanted
    assert read.one_host == (read.local_world_size == read.world_size)


@pytest.mark.parametrize(
    "values, missing, unset",
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT", "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR", "RANK and WORLD_SIZE"),
        ({"LOCAL_RANK": "x"}, ", ".join(REQUIRED), "LOCAL_RANK"),
        ({"MASTER_ADDR": "a", "LOCAL_WORLD_SIZE": "8"}, "RANK, WORLD_SIZE, MASTER_PORT", "LOCAL_WORLD_SIZE"),
    ],
)
def test_an_incomplete_place_names_the_missing_variables(place, values, missing, unset):
    with pytest.raises(UserError) as error:
        place(values)
    there = ", ".join(f"{name}={value}" for name, value in values.items())
    fix = f"start with torchrun, which sets all of them, or unset {unset} to start without torchrun"
    assert str(error.value).startswith(f"the environment has {there} but no {missing}; {fix}")


@pytest.mark.parametrize(
    "name, value, what",
    [
        *[(name, value, "is not a whole number") for name in LAUNCH if name != "MASTER_ADDR" for value in ("x", "-1")],
        *[(name, "", "is empty") for name in LAUNCH],
        ("RANK", "2", "is not below WORLD_SIZE=2"),
        ("RANK", "9" * 5000, "is not a whole number"),
        ("WORLD_SIZE", "0", "is not a whole number from 1 to 65536"),
        ("MASTER_PORT", "65536", "is not a whole number from 1 to 65535"),
        ("LOCAL_RANK", "2", "is not below"),
        ("LOCAL_RANK", "0", "of LOCAL_WORLD_SIZE=2 contradicts RANK=1 of WORLD_SIZE=2"),
        ("LOCAL_WORLD_SIZE", "3", "is more than WORLD_SIZE=2"),
        ("MASTER_ADDR", "127.0.0.1:29500", "cannot be resolved"),
    ],
)
def test_a_bad_value_is_named_with_its_fix(place, monkeypatch, name, value, what):
    def unknown(*_, **__):  # a real resolver may be slow, or know every name
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    if name == "MASTER_ADDR":
        monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError) as error:
        place(ONE_HOST | {name: value})
    unset = "RANK and WORLD_SIZE" if name in ("RANK", "WORLD_SIZE") else f"RANK, WORLD_SIZE and {name}"
    assert str(error.value).startswith(f"{name}={value} {what}") and f"unset {unset} to start" in str(error.value)


def test_the_agents_store_and_its_job_are_read(place):
    read = place(ONE_HOST | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job 7"})
    assert read.agent_store and read.job == "job 7" and not place(ONE_HOST).agent_store


def test_a_name_that_resolves_to_a_loopback_address_does_not_mean_one_host(place, monkeypatch):
    """Debian's /etc/hosts maps the host's own name to 127.0.1.1."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 29500))])
    assert not place(ONE_HOST | {"MASTER_ADDR": "hosta"}).one_host
    assert place(ONE_HOST | {"MASTER_ADDR": "localhost"}).one_host and place(ONE_HOST).one_host


def test_launch_refuses_before_anything_starts(place, monkeypatch):
    assert place({}) is None
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="the environment has RANK=0 but no WORLD_SIZE"):
        launch(pytest.fail, ("was called",), "cpu", "fp32")


@pytest.mark.parametrize("value", ["x", "", "0", "-2", "1.5"])
def test_bad_numbers_of_devices_and_ports_are_refused(monkeypatch, value):
    monkeypatch.setattr(detect, "tpu_chips", lambda: [])
    monkeypatch.setenv("CPU_NUM_DEVICES", value)
    for use in (lambda: detect.resolve("xla"), lambda: count_workers("xla", 0)):
        with pytest.raises(UserError, match=f"CPU_NUM_DEVICES={value} is .*; set it to the number of torch_xla's CPU"):
            use()
    monkeypatch.setenv("MASTER_PORT", value)
    with pytest.raises(UserError, match=f"MASTER_PORT={value} is .*; set it to a free port .*or unset MASTER_PORT"):
        master_port()


@pytest.mark.xla
@pytest.mark.parametrize("requested", ["auto", "xla"])
def test_a_misspelt_pjrt_device_is_refused(monkeypatch, requested):
    monkeypatch.setattr(detect, "tpu_chips", lambda: ["v6e"])
    monkeypatch.setenv("PJRT_DEVICE", "TPUU")
    with pytest.raises(UserError, match="PJRT_DEVICE=TPUU is not one of TPU, CPU, CUDA; correct it, or unset it"):
        detect.resolve(requested)
    assert detect.resolve("cpu") == "cpu", "PJRT_DEVICE is not read there"
    for value, device in (("", "TPU"), (" ", "TPU"), (" cpu ", "CPU")):
        monkeypatch.setenv("PJRT_DEVICE", value)
        assert detect.resolve(requested) == "xla" and os.environ["PJRT_DEVICE"] == device


@pytest.mark.parametrize(
    "values, hosts, said",
    [
        ({}, 1, ""),
        ({"TPU_PROCESS_ADDRESSES": "localhost:8476,localhost:8477", "CLOUD_TPU_TASK_ID": "0"}, 1, ""),
        ({"TPU_PROCESS_ADDRESSES": "a:8476, b:8476"}, 2, "TPU_PROCESS_ADDRESSES=a:8476, b:8476"),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c,d"}, 4, "TPU_WORKER_HOSTNAMES=a,b,c,d"),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, 1, ""),
        ({"TPU_WORKER_ID": "3"}, 4, "TPU_WORKER_ID=3"),
        ({"CLOUD_TPU_TASK_ID": "1"}, 2, "CLOUD_TPU_TASK_ID=1"),
    ],
)
def test_the_hosts_of_a_slice_are_counted(monkeypatch, values, hosts, said):
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "CLOUD_TPU_TASK_ID", "TPU_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert slice_hosts() == (hosts, said)


def test_a_process_that_would_train_alone_on_a_slice_is_refused(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    monkeypatch.setattr(detect, "tpu_chips", lambda: ["v6e"] * 4)
    assert is_slice_host("xla", 0) and is_slice_host("xla", 4) and not is_slice_host("cpu", None)
    for part in (None, 1, 2):
        with pytest.raises(UserError, match=r"^TPU_WORKER_HOSTNAMES=a,b means a slice of at least 2 hosts, but this"):
            is_slice_host("xla", part)
    monkeypatch.setattr(detect, "tpu_chips", lambda: [])
    with pytest.raises(UserError, match=r"would train alone; unset TPU_WORKER_HOSTNAMES$"):
        is_slice_host("xla", 0)
