"""A copy of vLLM's `fs` tier with a fault, made from the installed vLLM when a test runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["FAULTS", "PACKAGE", "Fault", "plant"]

PACKAGE = "planted_fs"

Edit = tuple[str, str, str]
"""A file, its text that is replaced, and the new text."""

BUFFERED: list[Edit] = [
    ("io.py", "    _HAS_FSIO_C = True\n", "    _HAS_FSIO_C = False\n"),
    ("manager.py", "probe_o_direct(os.path.dirname(config_path))", "False"),
]
"""Plain reads and writes in Python: the code that has the faults."""

NAME = "self.file_mapper.get_file_name(key)"
LOOKED_UP = "self._tier.file_mapper.get_file_name(k)"
EXISTS = "return (os.path.exists(p) for p in paths)"
WRITE = "written = os.write(fd, view_slice)"
SHORT: Edit = ("io.py", "if bytes_read < block_size:", "if bytes_read < 0:")
NO_C: Edit = ("manager.py", "    _HAS_BATCH_LOOKUP_C = True\n", "    _HAS_BATCH_LOOKUP_C = False\n")
SUCCESS: Edit = ("manager.py", "if load_keys is not None and not success:", "if False:")
DONE: Edit = ("manager.py", "success=success,", "success=True,")
FOUND: Edit = ("manager.py", EXISTS, "return (True for p in paths)")


class Fault(NamedTuple):
    """A fault, and the clause that finds it.

    Attributes:
        edits: what is replaced, besides `BUFFERED`.
        clause: the clause's ident.
        options: the tier's options beside its directory.
    """

    edits: list[Edit]
    clause: str
    options: Mapping[str, object] = MappingProxyType({})


def _named(key: str, other: str) -> list[Edit]:
    """Pages are named by a part of their keys."""
    return [
        ("manager.py", NAME, NAME.replace("(key)", f"({key})")),
        ("manager.py", LOOKED_UP, LOOKED_UP.replace("(k)", f"({other})")),
    ]


def _left_out(field: str, value: str) -> list[Edit]:
    """A fact about the engine is not in the name of the directory."""
    text = "        # Write config file\n"
    base = "self.file_mapper.base_path"
    fields = f'{{**self.file_mapper.fields, "{field}": {value}}}'
    made = f"        {base} = self.file_mapper._compute_base_path(root_dir, {fields})\n"
    return [("manager.py", text, made + text)]


IN_PLACE: list[Edit] = [
    ("io.py", "tmp_path = dest_path + _get_tmp_suffix()", "tmp_path = dest_path"),
    (
        "io.py",
        WRITE,
        "os.ftruncate(fd, len(view_slice)); written = sum("
        "os.write(fd, view_slice[i : i + 4096]) for i in range(0, len(view_slice), 4096))",
    ),
]

FAULTS = {
    "a load writes into another page's memory": Fault(
        [
            (
                "manager.py",
                "offsets = [int(cid) * self._block_size for cid in job_metadata.chunk_ids]",
                "offsets = [int(c) * self._block_size for c in job_metadata.chunk_ids[::-1]]",
            )
        ],
        "O1-round-trip",
    ),
    "a store is done before its data is read": Fault(
        [
            (
                "manager.py",
                "enqueue_store(job_metadata.job_id, 1, [task])",
                "enqueue_store(job_metadata.job_id, 1, "
                '[__import__("threading").Timer(0.2, task).start])',
            )
        ],
        "O1-stored-again",
    ),
    "every page is there": Fault([NO_C, FOUND, SUCCESS, DONE], "O1-absent"),
    "the last byte of a hash is not in a page's name": Fault(
        _named(r'key[:31] + b"\0" + key[32:]', r'k[:31] + b"\0" + k[32:]'), "O1-keys-apart"
    ),
    "the group is not in a page's name": Fault(
        _named("key[:32] + bytes(4)", "k[:32] + bytes(4)"), "O1-keys-apart"
    ),
    "an answer is kept when its request has ended": Fault(
        [("manager.py", "self._lookup_manager.cleanup(req_context.req_id)", "pass")],
        "O1-missing-then-stored",
    ),
    "a short read is a page": Fault([SHORT], "O2-truncated"),
    "a page that is gone is there, and loads": Fault([NO_C, FOUND, SUCCESS, DONE], "O2-removed"),
    "a page is written in its place": Fault(IN_PLACE, "O4-read-while-written"),
    "a kill leaves a page of its full length": Fault(IN_PLACE, "O3-killed-while-storing"),
    "two jobs share their list of places": Fault(
        [
            ("manager.py", "def load_task", "self.at = offsets\n\n        def load_task"),
            ("manager.py", "                    offsets,\n", "                    self.at,\n"),
        ],
        "O4-jobs-together",
    ),
    "a page is written over in its place": Fault(
        [
            *IN_PLACE,
            ("io.py", "    if os.path.exists(dest_path):\n        return\n", ""),
            ("io.py", "os.O_CREAT | os.O_EXCL | os.O_WRONLY", "os.O_CREAT | os.O_WRONLY"),
        ],
        "O4-two-writers",
    ),
    "the capacity is not kept": Fault(
        [("manager.py", "root_dir: str,\n", "root_dir: str,\n        most: int = 0,\n")],
        "O5-capacity",
        {"most": "{capacity}"},
    ),
    "a page that could not be written stays": Fault(
        [
            SHORT,
            ("io.py", "    os.remove(tmp_path)\n", "    os.replace(tmp_path, dest_path)\n"),
        ],
        "O5-full-disk",
    ),
    "pages are read in the scheduler's thread": Fault(
        [
            (
                "manager.py",
                "self._pool.enqueue_load(job_id, 1, [load_task])",
                "load_task(); self._pool.enqueue_load(job_id, 1, [lambda: None])",
            )
        ],
        "O6-hanging-file",
    ),
    "a shutdown removes the pages": Fault(
        [
            (
                "manager.py",
                "        self._pool.shutdown(wait=True)\n",
                "        self._pool.shutdown(wait=True)\n"
                '        __import__("shutil").rmtree(f"{self.file_mapper.base_path}_r0", True)\n',
            )
        ],
        "O7-restart",
    ),
    "the dtype is not in the directory's name": Fault(_left_out("dtype", '""'), "O8-dtype"),
    "blocks of a page are not in the directory's name": Fault(
        [SHORT, *_left_out("blocks_per_file", "1")], "O8-page-blocks"
    ),
    "the layers are not in the directory's name": Fault(
        _left_out("kv_cache_groups", "[]"), "O8-layers"
    ),
    "the model is not in the directory's name": Fault(_left_out("model_name", '"m"'), "O9-model"),
    "the ranks are not in the directory's name": Fault(_left_out("tp_size", "1"), "O9-n-ranks"),
    "a job is reported twice": Fault(
        [
            (
                "thread_pool.py",
                "jobs.append(self._finished_q.popleft())",
                "jobs += [self._finished_q.popleft()] * 2",
            )
        ],
        "O10-jobs-end-once",
    ),
    "a failed load is a success": Fault([SUCCESS, DONE], "O10-page-cut"),
    "a page that cannot be loaded stays a hit": Fault(
        [NO_C, FOUND, ("manager.py", "self._lookup_manager.mark_miss(failed)", "pass")],
        "O10-page-lost",
    ),
    "a failed job is not reported": Fault(
        [("thread_pool.py", "                job_finished, success, total_time = state.task_done(\n"
          "                    False, transfer_time\n                )\n",
          "                continue\n")],
        "O10-page-cut",
    ),
    "a page that is cut while the tier is open is a page": Fault([SHORT], "O10-page-cut"),
    "a drain does not wait": Fault(
        [("manager.py", "self._pool.wait_idle()", "pass")], "O11-drained"
    ),
    "a shutdown does not wait": Fault(
        [("manager.py", "self._pool.shutdown(wait=True)", "self._pool.shutdown(wait=False)")],
        "O11-shutdown-in-flight",
    ),
    "a lock is left behind": Fault(
        [
            (
                "manager.py",
                "        # Write config file\n",
                '        open(root_dir + "/lock", "x").close()\n        # Write config file\n',
            )
        ],
        "O11-opened-again",
    ),
}  # fmt: skip
"""Faults by what they do."""


def plant(directory: Path, edits: list[Edit]) -> str:
    """Write the copy into a directory of the import path; the class's name for `check-tier`.

    Raises:
        AssertionError: this vLLM's text is another one.
    """
    found = importlib.util.find_spec("vllm.v1.kv_offload.tiering.fs")
    assert found is not None
    assert found.origin is not None
    package = directory / PACKAGE
    package.mkdir()
    texts = {each.name: each.read_text() for each in Path(found.origin).parent.glob("*.py")}
    for name, old, new in [*BUFFERED, *edits]:
        assert old in texts[name], f"{name} has no {old!r}"
        texts[name] = texts[name].replace(old, new)
    for name, text in texts.items():
        moved = text.replace("vllm.v1.kv_offload.tiering.fs.", f"{PACKAGE}.")
        (package / name).write_text(moved)
    return f"{PACKAGE}.manager:FileSystemTierManager"
