"""A run's checkpoints in an object store, or in any other file system that fsspec knows: s3://bucket/run.

A folder there has the files of one here. Its marker says from the first file on that it isn't complete, until all files
are there, as in a folder here.
"""

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from accel_fsdp import atomic_files, console, disks
from accel_fsdp.checkpoints import completeness, file_names, marker
from accel_fsdp.errors import UsageError, UserError, did_you_mean, one_line

URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+(.+?)/*")
"""A URI, also one that became a path, which has a single slash. A drive of Windows has a single letter."""
PASSWORD = re.compile(r"://[^/@]*:[^/@]*@|\?")
"""A password before the name of a host, or a signature behind a path."""


OPTIONS = {protocol: {"auto_mkdir": True} for protocol in ("file", "local")}


def uri_of(place: Path | str) -> str:
    """The URI that a flag's value is; empty for a path of this machine."""
    match = URI.fullmatch(str(place))
    return f"{match[1].lower()}:{'///' if match[1] in ('file', 'local') else '//'}{match[2]}" if match else ""


def reason(error: BaseException) -> str:
    """An error of a store in one line."""
    return one_line(str(error).strip().partition("\n")[0] or type(error).__name__)


class Damaged(UserError):
    """A checkpoint's bytes in a store aren't those that were written."""


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
            self.files, self.root = fsspec.core.url_to_fs(self.uri or f"{uri}://", **OPTIONS.get(protocol, {}))
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

    def marker_of(self, name: str) -> bytes:
        """The content of a checkpoint's marker; empty if there is none."""
        self.files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            content: bytes = self.files.cat_file(self._path(name, file_names.MARKER))
            return content
        return b""

    def checkpoints(self) -> list[str]:
        """The names of all checkpoints, complete or not, the oldest first."""
        names = {path.partition("/")[0] for path in self.sizes()}
        return sorted((name for name in names if file_names.step(name) >= 0), key=file_names.step)

    def lacking(self, name: str) -> str:
        """Why a checkpoint can't be taken; empty if it is complete: it has a marker, and all that this lists."""
        there, content = self.sizes(name), self.marker_of(name)
        written = marker.parsed(content, Path(self.uri, name, file_names.MARKER)) if content else None
        if written is None or not written.complete:
            return "not all of it has been uploaded" if there else "there is no such checkpoint"
        return next(_shortfalls(there, written.sizes), "")

    def newest(self) -> tuple[str, dict[str, str]]:
        """The newest complete checkpoint's name, or an empty one; and why each newer one can't be taken."""
        skipped: dict[str, str] = {}
        for name in reversed(self.checkpoints()):
            if not (why := self.lacking(name)):
                return name, skipped
            skipped[name] = why
        return "", skipped

    def begin(self, checkpoint: Path, is_first: bool = True) -> bool:
        """Whether a checkpoint has to be uploaded; the first machine marks it as unfinished before its files come."""
        content = (checkpoint / file_names.MARKER).read_bytes()
        is_there = self.marker_of(checkpoint.name) == content
        if not is_there and is_first:
            self.unseal(checkpoint.name)
        return not is_there

    def unseal(self, name: str) -> None:
        """Marks a checkpoint as unfinished."""
        self.files.pipe_file(self._path(name, file_names.MARKER), marker.UNFINISHED.encode())

    def put(self, folder: Path, name: str) -> None:
        """Uploads a file of one of the run's folders."""
        self.files.put_file(str(folder / name), self._path(folder.name, name))

    def describe(self, run: Path) -> None:
        """Uploads the description of a run's model, which an export needs."""
        for name in marker.sizes_of(run / file_names.DESCRIBED).keys() - self.sizes(file_names.DESCRIBED).keys():
            self.put(run / file_names.DESCRIBED, name)

    def seal(self, checkpoint: Path) -> None:
        """Uploads the marker, which makes a checkpoint complete.

        Raises:
            BlockingIOError: another machine has not uploaded its files.
        """
        if short := next(_shortfalls(self.sizes(checkpoint.name), marker.listed(checkpoint)), ""):
            raise BlockingIOError(f"{short}: another machine has not uploaded it")
        self.put(checkpoint, file_names.MARKER)

    def delete(self, name: str) -> None:
        """Deletes a checkpoint, which counts as unfinished from the first moment on."""
        self.unseal(name)
        self.files.rm(f"{self.root}/{name}", recursive=True)

    def retire(self, keep: int | None, best: str | None) -> None:
        """Deletes what `completeness.retire` would delete of a folder of this machine."""
        names = self.checkpoints()
        for name in completeness.outdated(names, [name for name in names if not self.lacking(name)], keep, best):
            self.delete(name)

    def get(self, name: str, run: Path, needed: Callable[[str], bool] = bool) -> None:
        """Fetches the `needed` files of a checkpoint, and the model's description, into a run's folder.

        Raises:
            UserError: the disk is too small for it, or its bytes have changed. Nothing is left of it then.
        """
        written = marker.parsed(self.marker_of(name), Path(self.uri, name, file_names.MARKER))
        files = [file for file in written.sizes if needed(file)]
        needed_bytes = sum(written.sizes[file] for file in files)
        fix = "free some space, or another folder"
        disks.check_room(run, needed_bytes, f"{name} takes", "it can't be fetched", fix)
        with atomic_files.replaced_folder(run / name) as folder:
            self._get(name, [*files, file_names.MARKER], folder)
            if damage := marker.damage(folder, needed):
                raise Damaged(f"{self.uri}/{name}: {damage}", why="it isn't what was written", fix="an older one")
        if not (run / file_names.DESCRIBED).exists():
            self._get(file_names.DESCRIBED, list(self.sizes(file_names.DESCRIBED)), run / file_names.DESCRIBED)

    def _get(self, name: str, files: list[str], target: Path) -> None:
        with console.waiting(f"fetching {self.uri}/{name}"):
            self.files.get([self._path(name, file) for file in files], [str(target / file) for file in files])

    def _path(self, name: str, file: str) -> str:
        return f"{self.root}/{name}/{file}"


def _shortfalls(there: dict[str, int], listed: dict[str, int]) -> Iterator[str]:
    """The listed files that are missing or have another size."""
    for file, size in listed.items():
        if there.get(file) != size:
            yield f"{file} has {there[file]:,} of {size:,} bytes" if file in there else f"{file} is missing"


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
    folder = atomic_files.existing_part(beside.absolute().parent)
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=folder) as temporary, contextlib.ExitStack() as reaching:
        reaching.enter_context(store.reached())
        name, skipped = (name, {name: store.lacking(name)}) if store.uri == run else store.newest()
        if not name or skipped.get(name):
            raise UserError(
                f"{uri} is no complete checkpoint",
                why="; ".join(f"{folder}: {lack}" for folder, lack in skipped.items()) or f"{store.uri} holds none",
                fix="the URI of a run, as given to train/sft.py --checkpoint_uri, or of a checkpoint-N in it",
            )
        store.get(name, Path(temporary), needed)
        reaching.close()
        console.say(f"fetched: {store.uri}/{name}", style="cyan")
        yield Path(temporary, name)
