"""A run's checkpoints in an object store, or in any other file system that fsspec knows: s3://bucket/run.

A folder there has the files of one here. Its marker says from the first file on that it isn't complete, until all files
are there, as in a folder here.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accel_fsdp import atomic_files, console, disks
from accel_fsdp.checkpoints import completeness, file_names, marker
from accel_fsdp.errors import UsageError, UserError, did_you_mean, one_line

URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+(.+?)/*")
"""A URI, also one that became a path, which has a single slash. A drive of Windows has a single letter."""
PASSWORD = re.compile(r"://[^/@]*:[^/@]*@|\?")
"""A password before the name of a host, or a signature behind a path."""
TOGETHER = 2
"""Files that a process fetches at the same time."""
DONE = ".uploaded-"
"""The start of the name of an object that says which marker's files a machine has uploaded; its number follows."""


def uri_of(place: Path | str) -> str:
    """The URI that a flag's value is; empty for a path of this machine."""
    match = URI.fullmatch(str(place))
    return f"{match[1].lower()}:{'///' if match[1] in ('file', 'local') else '//'}{match[2]}" if match else ""


def reason(error: BaseException) -> str:
    """An error of a store in one line."""
    return one_line(str(error).strip().partition("\n")[0] or type(error).__name__)


class Waits(OSError):
    """Another machine's part of an upload has to come first."""


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
        if PASSWORD.search(self.uri):
            raise UsageError(
                f"{protocol}://... holds a password or a signature",
                why="logs and run.json would show it",
                fix="the variables or files of the store's own tools, such as AWS_PROFILE and ~/.aws/credentials",
            )
        try:
            options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
            self.files, self.root = fsspec.core.url_to_fs(self.uri or f"{uri}://", **options)
        except (ImportError, ValueError) as error:
            raise UsageError(
                f"{uri} is not in a store that fsspec knows.{did_you_mean(protocol, fsspec.available_protocols())}",
                why=reason(error),
                fix="s3://BUCKET/RUN, gs://BUCKET/RUN, az://CONTAINER/RUN (pip install 'accel-fsdp[s3]', gs or az), "
                "hf://REPO/RUN or file:///FOLDER",
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

    def sizes(self, name: str = "") -> dict[str, int]:
        """The size of each file of the run, or of one checkpoint, by its path relative to it.

        Raises:
            UserError: an object's name leads out of the folder.
        """
        root = f"{self.root}/{name}" if name else self.root
        self.files.invalidate_cache()
        start = len(self.files._strip_protocol(root)) + 1
        files = self.files.find(root, detail=True).items()
        sizes = {path[start:]: int(info["size"]) for path, info in files if len(path) > start}
        if outside := next((path for path in sizes if not marker.is_inside(path)), None):
            raise UserError(
                f"{self.uri} holds an object named {outside!r}, outside of its folder",
                why="a checkpoint doesn't belong there; nothing was fetched",
                fix="don't trust this checkpoint; delete the object, or find out who wrote it",
            )
        return sizes

    def checkpoints(self) -> list[str]:
        """The names of all checkpoints, complete or not, the oldest first."""
        names = {path.partition("/")[0] for path in self.sizes()}
        return sorted((name for name in names if file_names.step(name) >= 0), key=file_names.step)

    def lacking(self, name: str) -> str:
        """Why a checkpoint can't be taken; empty if it is complete: it has a marker, and all that this lists."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, file_names.MARKER).write_bytes(self._read(name, file_names.MARKER))
            written = marker.read(Path(folder))
        there = self.sizes(name)
        if written is None or not written.complete:
            return "not all of it has been uploaded" if there else "there is no such checkpoint"
        file = next((file for file, size in written.sizes.items() if there.get(file) != size), "")
        has = f"has {there.get(file, 0):,} of {written.sizes.get(file, 0):,} bytes" if file in there else "is missing"
        return f"{file} {has}" if file else ""

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

    def begin(self, checkpoint: Path, machine: int = 0) -> bool:
        """Marks a checkpoint as unfinished, before any of its files goes up; not if it is there, which is returned.

        Other machines than the first wait for that: a file of theirs must not change a complete checkpoint.
        """
        there = self._read(checkpoint.name, file_names.MARKER)
        if there == (checkpoint / file_names.MARKER).read_bytes():
            return True
        if machine == 0:
            self.unseal(checkpoint.name)
        elif there not in (b"", marker.UNFINISHED.encode()):
            raise Waits("machine 0 has not begun")
        return False

    def unseal(self, name: str) -> None:
        """Marks a checkpoint as unfinished."""
        self.files.pipe_file(self._path(name, file_names.MARKER), marker.UNFINISHED.encode())

    def upload(self, folder: Path, names: Iterable[str]) -> None:
        """Uploads files of one of the run's folders, and compares their sizes."""
        for name in names:
            path = self._path(folder.name, name)
            self.files.put_file(str(folder / name), path)
            self.files.invalidate_cache()
            size, expected = self.files.info(path)["size"], (folder / name).stat().st_size
            if size != expected:
                raise OSError(f"{folder.name}/{name} has {size:,} of {expected:,} bytes in the store")

    def finish(self, checkpoint: Path, machine: int = 0, machines: int = 1) -> None:
        """Notes that a machine's files are there; the first one makes the checkpoint complete, once all have."""
        content = (checkpoint / file_names.MARKER).read_bytes()
        if machine:
            self.files.pipe_file(self._path(checkpoint.name, f"{DONE}{machine}"), content)
            return
        if late := [other for other in range(1, machines) if self._read(checkpoint.name, f"{DONE}{other}") != content]:
            raise Waits(f"machine {late[0]} has not uploaded its files")
        for name in self.sizes(checkpoint.name).keys() - marker.listed(checkpoint).keys() - {file_names.MARKER}:
            self.files.rm_file(self._path(checkpoint.name, name))  # of an earlier one, or those notes
        self.upload(checkpoint, [file_names.MARKER])

    def describe(self, run: Path) -> None:
        """Uploads the description of a run's model, which an export needs, where files of it are missing."""
        there, model = self.sizes(file_names.DESCRIBED), run / file_names.DESCRIBED
        self.upload(model, [name for name, size in marker.sizes_of(model).items() if there.get(name) != size])

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
        there, names = self.sizes(), self.checkpoints()
        sealed = len(marker.UNFINISHED) + 1
        complete = [name for name in names if there.get(f"{name}/{file_names.MARKER}", 0) >= sealed]
        for name in completeness.outdated(names, complete, keep, best):
            self.delete(name)

    # From the store

    def get(self, name: str, run: Path, needed: Callable[[str], bool] = bool) -> str:
        """Fetches the `needed` files of a checkpoint, and the model's description, into a run's folder.

        Whole or not at all: returns the file whose bytes aren't those that were written.

        Raises:
            UserError: the disk is too small for it.
        """
        sizes = {file: size for file, size in self.sizes(name).items() if needed(file)}
        needed_bytes, arriving = sum(sizes.values()), run / f".{name}.arriving"
        disks.check_room(
            run, needed_bytes, f"{name} takes", "it can't be fetched", "free some space, or another folder"
        )
        shutil.rmtree(arriving, ignore_errors=True)  # left by a process that was killed
        try:
            with console.progress(f"fetching {name}", needed_bytes) as moved:
                self._fetch(name, sizes, arriving, moved)
            if damage := marker.damage(arriving, needed):
                return damage
            shutil.rmtree(run / name, ignore_errors=True)  # a half-written one
            os.replace(arriving, run / name)
        finally:
            shutil.rmtree(arriving, ignore_errors=True)
            with contextlib.suppress(OSError):
                run.rmdir()  # if it was made for this alone
        if not (run / file_names.DESCRIBED).exists():
            described = self.sizes(file_names.DESCRIBED)
            self._fetch(file_names.DESCRIBED, described, run / file_names.DESCRIBED, lambda size: None)
        return ""

    def _fetch(self, name: str, files: Iterable[str], target: Path, moved: Callable[[int], None]) -> None:
        def fetch_one(file: str) -> None:
            path = target / file
            path.parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(self._path(name, file), str(path))
            moved(path.stat().st_size)

        with ThreadPoolExecutor(TOGETHER) as pool:
            list(pool.map(fetch_one, files))

    def _read(self, name: str, file: str) -> bytes:
        """The content of a small file; empty if there is none."""
        self.files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            content: bytes = self.files.cat_file(self._path(name, file))
            return content
        return b""

    def _path(self, name: str, file: str) -> str:
        return f"{self.root}/{name}/{file}"


@contextlib.contextmanager
def fetched(place: Path, beside: Path, needed: Callable[[str], bool]) -> Iterator[Path]:
    """`place` itself, or for a URI a temporary copy of that checkpoint's `needed` files in the folder of `beside`.

    Of a run's URI the newest complete checkpoint is taken. The description of the model comes along.

    Raises:
        UserError: there is none, it isn't complete, or the store can't be reached.
    """
    if not (uri := uri_of(place)):
        yield place
        return
    run, _, name = uri.rpartition("/")
    store = Store(run if file_names.step(name) >= 0 else uri)
    with store.reached():
        name, skipped = (name, {name: store.lacking(name)}) if store.uri == run else store.newest()
    why = "; ".join(f"{folder}: {lack}" for folder, lack in skipped.items() if lack)
    with tempfile.TemporaryDirectory(
        prefix=".fetched-", dir=atomic_files.existing_part(beside.absolute().parent)
    ) as temporary:
        if name and not (skipped.get(name)):
            with store.reached():
                why = store.get(name, Path(temporary), needed)
        if not Path(temporary, name or "-").exists():
            raise UserError(
                f"{uri} is no complete checkpoint",
                why=why or f"{store.uri} holds none",
                fix="the URI of a run, as given to train/sft.py --checkpoint_uri, or of a checkpoint-N in it",
            )
        console.say(f"fetched: {store.uri}/{name}", style="cyan")
        yield Path(temporary, name)
