"""A run's checkpoints in an object store, or in any other file system that fsspec knows: s3://bucket/run.

A folder there has the files of one here. Its marker says from the first file on that it isn't complete, until all files
are there, as in a folder here.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accel_fsdp import atomic_files, console, disks
from accel_fsdp.checkpoints import completeness, file_names, marker
from accel_fsdp.errors import UsageError, UserError, did_you_mean, one_line

URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+(.+?)/*")
"""A URI, also one that became a path, which has a single slash. A drive of Windows has a single letter."""
PASSWORD = re.compile(r"://[^/@]*:[^/@]*@|\?")
"""A password before the name of a host, or a signature behind a path."""
TOGETHER = 2
"""Files or parts of a file that a process moves at the same time: each part takes 50 MB of memory."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **{protocol: {"max_concurrency": TOGETHER} for protocol in ("s3", "s3a", "az", "abfs", "abfss")},
    **{protocol: {"auto_mkdir": True} for protocol in ("file", "local")},
}
"""Settings of fsspec's file systems, by protocol."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""The extra of this package that installs a protocol's library."""


def uri_of(place: Path | str) -> str:
    """The URI that a flag's value is; empty for a path of this machine."""
    match = URI.fullmatch(str(place))
    return f"{match[1].lower()}:{'///' if match[1] in ('file', 'local') else '//'}{match[2]}" if match else ""


def split(uri: str) -> tuple[str, str]:
    """A run's URI, and the name of a checkpoint in it; an empty name where the URI is that of the run."""
    run, _, name = uri.rpartition("/")
    return (run, name) if file_names.step(name) >= 0 else (uri, "")


def reason(error: BaseException) -> str:
    """An error of a store in one line."""
    text = str(error).strip().partition("\n")[0]
    return one_line(text or type(error).__name__)


class Store:
    """A run's folder in a store. Methods raise what its library raises; `reached` makes one error of it."""

    def __init__(self, uri: str) -> None:
        """Opens no connection.

        Raises:
            UserError: the protocol is unknown, its library isn't installed, or the URI holds a password.
        """
        import fsspec  # with the store's own library it takes a third of a second

        self.uri = uri_of(uri)
        protocol = self.uri.partition(":")[0]
        if not self.uri or protocol not in fsspec.available_protocols():
            raise UsageError(
                f"{uri} is not in a store that fsspec knows.{did_you_mean(protocol, fsspec.available_protocols())}",
                why="checkpoints can't be read or written there",
                fix="s3://BUCKET/RUN, gs://BUCKET/RUN, az://CONTAINER/RUN, hf://REPO/RUN or file:///FOLDER",
            )
        if PASSWORD.search(self.uri):
            raise UsageError(
                f"{protocol}://... holds a password or a signature",
                why="logs and run.json would show it",
                fix="the variables or files of the store's own tools, such as AWS_PROFILE and ~/.aws/credentials",
            )
        try:
            self.files, self.root = fsspec.core.url_to_fs(self.uri, **OPTIONS.get(protocol, {}))
        except ImportError as error:
            extra = EXTRAS.get(protocol)
            raise UserError(
                f"{self.uri}: {reason(error)}",
                why="its library isn't installed",
                fix=f"pip install 'accel-fsdp[{extra}]'" if extra else "pip install what that message names",
            ) from error

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """Raises a UserError for any error of the store in the block."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # each store has its own library, with its own classes
            if isinstance(error, OSError) and error.errno in disks.NO_ROOM:
                raise  # the disk here
            raise UserError(
                f"{self.uri}: {reason(error)}",
                why="the checkpoints there can't be read or written",
                fix="check the name, the network, and the store's usual variables and files, such as AWS_PROFILE, "
                "AWS_ENDPOINT_URL and ~/.aws/credentials",
            ) from error

    # What is there

    def sizes(self, name: str = "") -> dict[str, int]:
        """The size of each file of the run, or of one checkpoint, by its path relative to it.

        Raises:
            UserError: an object's name leads out of the folder.
        """
        root = f"{self.root}/{name}" if name else self.root
        self.files.invalidate_cache()
        found = self.files.find(root, detail=True)
        start = len(self.files._strip_protocol(root)) + 1
        sizes = {path[start:]: int(info["size"]) for path, info in found.items() if len(path) > start}
        if outside := next((path for path in sizes if not marker.is_inside(path)), None):
            raise UserError(
                f"{self.uri} holds an object named {outside!r}, outside of its folder",
                why="a checkpoint doesn't belong there; nothing was fetched",
                fix="don't trust this checkpoint; delete the object, or find out who wrote it",
            )
        return sizes

    def checkpoints(self) -> list[str]:
        """The names of all checkpoints, complete or not, the oldest first."""
        return _checkpoints_of(self.sizes())

    def lacking(self, name: str) -> str:
        """Why a checkpoint can't be taken; empty if it is complete: it has a marker, and all that this lists."""
        with self.read(name, (file_names.MARKER,)) as folder:
            written = marker.read(folder)
        there = self.sizes(name)
        if written is None or not written.complete:
            return "not all of it has been uploaded" if there else "there is no such checkpoint"
        absent = next((file for file, size in written.sizes.items() if there.get(file) != size), "")
        return (
            f"{absent} has {there[absent]:,} of {written.sizes[absent]:,} bytes"
            if absent in there
            else (f"{absent} is missing" if absent else "")
        )

    def newest(self, damaged: Collection[str] = ()) -> tuple[str, dict[str, str]]:
        """The newest complete checkpoint's name, or an empty one; and why each newer one can't be taken.

        Those that are known as `damaged` are left out.
        """
        skipped: dict[str, str] = {}
        for name in reversed([name for name in self.checkpoints() if name not in damaged]):
            if not (why := self.lacking(name)):
                return name, skipped
            skipped[name] = why
        return "", skipped

    # To the store

    def begin(self, checkpoint: Path) -> bool:
        """Marks a checkpoint as unfinished, before any of its files goes up; not if it is there, which is returned."""
        path, own = self._path(checkpoint.name, file_names.MARKER), (checkpoint / file_names.MARKER).read_bytes()
        self.files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            if self.files.cat_file(path) == own:
                return True
        self.unseal(checkpoint.name)
        return False

    def unseal(self, name: str) -> None:
        """Marks a checkpoint as unfinished."""
        self.files.pipe_file(self._path(name, file_names.MARKER), marker.UNFINISHED.encode())

    def upload(self, folder: Path, name: str) -> None:
        """Uploads a file of one of the run's folders, and compares its size."""
        path = self._path(folder.name, name)
        self.files.put_file(str(folder / name), path)
        self.files.invalidate_cache()
        size, expected = self.files.info(path)["size"], (folder / name).stat().st_size
        if size != expected:
            raise OSError(f"{folder.name}/{name} has {size:,} of {expected:,} bytes in the store")

    def seal(self, checkpoint: Path) -> None:
        """Makes a checkpoint complete, once all of its files are there; deletes files of an earlier one."""
        for name in self.sizes(checkpoint.name).keys() - marker.listed(checkpoint).keys() - {file_names.MARKER}:
            self.files.rm_file(self._path(checkpoint.name, name))
        self.upload(checkpoint, file_names.MARKER)

    def describe(self, run: Path) -> None:
        """Uploads the description of a run's model, which an export needs, where files of it are missing."""
        there, model = self.sizes(file_names.DESCRIBED), run / file_names.DESCRIBED
        for name, size in marker.sizes_of(model).items():
            if there.get(name) != size:
                self.upload(model, name)

    def put(self, checkpoint: Path) -> None:
        """Uploads a whole checkpoint, if it isn't there already, with the description of its run's model."""
        if self.begin(checkpoint):
            return
        self.describe(checkpoint.parent)
        for name in marker.listed(checkpoint):
            self.upload(checkpoint, name)
        self.seal(checkpoint)

    def get(self, name: str, run: Path, needed: Callable[[str], bool] = bool) -> None:
        """Fetches the `needed` files of a checkpoint into a run's folder, whole or not at all.

        The description of the model comes along.

        Raises:
            UserError: its bytes aren't those that were written, or the disk is full.
        """
        sizes = {file: size for file, size in self.sizes(name).items() if needed(file)}
        with arriving(run, name, sum(sizes.values())) as folder:
            with console.progress(f"fetching {name}", sum(sizes.values())) as moved:
                self.fetch(name, sizes, folder, moved)
            if damaged := marker.damage(folder, needed):
                raise UserError(
                    f"{self.uri}/{name}: {damaged}",
                    why="the model would be another one",
                    fix=f"the URI of an older one: {', '.join(self.checkpoints())}",
                )
        if not (run / file_names.DESCRIBED).exists():
            self.fetch(file_names.DESCRIBED, self.sizes(file_names.DESCRIBED), run / file_names.DESCRIBED)

    def delete(self, name: str) -> None:
        """Deletes a checkpoint, which counts as unfinished from the first moment on."""
        files = self.sizes(name).keys() - {file_names.MARKER}
        self.unseal(name)
        for file in (*files, file_names.MARKER):
            self.files.rm_file(self._path(name, file))
        with contextlib.suppress(FileNotFoundError):  # an object store has no folders that stay
            self.files.rm(f"{self.root}/{name}", recursive=True)

    def retire(self, keep: int | None, best: str | None) -> None:
        """Deletes what `completeness.retire` would delete of a folder of this machine."""
        there = self.sizes()
        names = _checkpoints_of(there)
        markers = {name: there.get(f"{name}/{file_names.MARKER}", 0) for name in names}
        complete = [name for name, size in markers.items() if size > len(marker.UNFINISHED)]
        for name in completeness.outdated(names, complete, keep, best):
            self.delete(name)

    # From the store

    def fetch(self, name: str, files: Iterable[str], target: Path, moved: Callable[[int], None] | None = None) -> None:
        """Downloads files of a checkpoint, or of another of the run's folders, to the folder `target`."""

        def fetch_one(file: str) -> None:
            path = target / file
            path.parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(self._path(name, file), str(path))
            if moved is not None:
                moved(path.stat().st_size)

        with ThreadPoolExecutor(TOGETHER) as pool:
            list(pool.map(fetch_one, files))

    @contextlib.contextmanager
    def read(self, name: str, files: Iterable[str]) -> Iterator[Path]:
        """A temporary folder with small files of a checkpoint, without those that aren't there."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / name
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    self.fetch(name, (file,), folder)
            yield folder

    def _path(self, name: str, file: str) -> str:
        return f"{self.root}/{name}/{file}"


def _checkpoints_of(paths: Iterable[str]) -> list[str]:
    """The names of the checkpoints that files of a run are in, the oldest first."""
    names = {path.partition("/")[0] for path in paths if "/" in path}
    return sorted((name for name in names if file_names.step(name) >= 0), key=file_names.step)


def arriving_at(run: Path, name: str) -> Path:
    """The folder in which the files of a checkpoint arrive."""
    return run / f".{name}.arriving"


@contextlib.contextmanager
def arriving(run: Path, name: str, size_bytes: int) -> Iterator[Path]:
    """A folder to fetch a checkpoint to, which takes its place in the run when the block ends, or goes if it fails.

    Raises:
        UserError: the disk is too small for it.
    """
    partial = arriving_at(run, name)
    disks.check_room(run, size_bytes, f"{name} takes", "it can't be fetched", "free some space, or another folder")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    try:
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(run / name, ignore_errors=True)  # a half-written one
        os.replace(partial, run / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            run.rmdir()  # if it was made for this alone


@contextlib.contextmanager
def fetched(place: Path, beside: Path, needed: Callable[[str], bool]) -> Iterator[Path]:
    """`place` itself, or for a URI a temporary copy of that checkpoint's `needed` files in the folder of `beside`.

    Of a run's URI the newest complete checkpoint is taken. The description of the model comes along.
    """
    if not uri_of(place):
        yield place
        return
    beside = atomic_files.existing_part(beside.absolute().parent)
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=beside) as temporary:
        store, name = named(place)
        with store.reached():
            store.get(name, Path(temporary), needed)
        console.say(f"fetched: {store.uri}/{name}", style="cyan")
        yield Path(temporary, name)


def named(place: Path | str) -> tuple[Store, str]:
    """The store that a URI is in, and the complete checkpoint that it names: of a run's URI the newest one.

    Raises:
        UserError: there is none, it isn't complete, or the store can't be reached.
    """
    run, name = split(uri_of(place) or str(place))
    store = Store(run)
    with store.reached():
        name, skipped = (name, {name: store.lacking(name)}) if name else store.newest()
    if not name or skipped.get(name):
        raise UserError(
            f"{uri_of(place)} is no complete checkpoint",
            why="; ".join(f"{folder}: {why}" for folder, why in skipped.items()) or f"{store.uri} holds none",
            fix="the URI of a run, as given to train/sft.py --checkpoint_uri, or of a checkpoint-N in it",
        )
    return store, name
