"""A run's checkpoints in an object store, or in any other file system that fsspec knows: s3://bucket/run.

A folder there has the files of one here. Its marker says from the first file on that it isn't complete, until all files
are there, as in a folder here.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from accel_fsdp import atomic_files, console, disks, untrusted_files
from accel_fsdp.checkpoints import completeness, file_names, marker
from accel_fsdp.errors import UsageError, UserError, did_you_mean, first_line

URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/+(.+?)/*")
"""A URI, also one that became a path, which has a single slash. A drive of Windows has a single letter."""
PASSWORD = re.compile(r"://[^/@]*:[^/@]*@|\?")
"""A password before the name of a host, or a signature behind a path."""


def uri_of(place: Path | str) -> str:
    """The URI that a flag's value is; empty for a path of this machine."""
    match = URI.fullmatch(str(place))
    return f"{match[1].lower()}:{'///' if match[1] in ('file', 'local') else '//'}{match[2]}" if match else ""


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
        options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        try:
            self.files, self.root = fsspec.core.url_to_fs(self.uri or f"{uri}://", **options)
        except (ImportError, ValueError) as error:
            raise UsageError(
                f"{uri} is not in a store that fsspec knows.{did_you_mean(protocol, fsspec.available_protocols())}",
                why=first_line(error),
                fix="s3://BUCKET/RUN, gs://BUCKET/RUN, az://CONTAINER/RUN (pip install 'accel-fsdp[s3]', gs or az), "
                "hf://REPO/RUN or file:///FOLDER",
            ) from error

    @contextlib.contextmanager
    def reached(self, otherwise: str = "") -> Iterator[None]:
        """Makes one error of any that the store raises in the block, or a line that says what happens `otherwise`."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # each store has its own library, with its own classes
            what = f"{self.uri}: {first_line(error)}"
            if otherwise:
                return console.say(f"{what}; {otherwise}", style="yellow")
            raise UserError(
                what,
                why="the checkpoints there can't be read or written",
                fix="check the name, the network, and the store's usual variables and files, such as AWS_PROFILE, "
                "AWS_ENDPOINT_URL and ~/.aws/credentials",
            ) from error

    def names(self, folder: str = "") -> list[str]:
        """The names of all files of the run, or of a folder of it, relative to it.

        Raises:
            UserError: an object's name leads out of the folder.
        """
        root = f"{self.root}/{folder}".rstrip("/")
        self.files.invalidate_cache()
        names = [path[len(root) + 1 :] for path in self.files.find(root) if path != root]
        for name in names:
            untrusted_files.inside(Path(self.uri), name, "")
        return names

    def marker_of(self, name: str, machine: int = 0) -> bytes:
        """The content of a checkpoint's marker, or of a machine's copy of it; without one it isn't complete."""
        self.files.invalidate_cache()
        try:
            return bytes(self.files.cat_file(self._marker(name, machine)))
        except FileNotFoundError:
            return marker.UNFINISHED.encode()

    def checkpoints(self) -> list[str]:
        """The names of all checkpoints, complete or not, the oldest first."""
        return file_names.numbered({name.partition("/")[0] for name in self.names()})

    def written(self, name: str) -> marker.Marker:
        return marker.parsed(self.marker_of(name), Path(self.uri, name, file_names.MARKER))

    def newest(self) -> str:
        """The newest complete checkpoint's name; empty if there is none."""
        return next((name for name in reversed(self.checkpoints()) if self.written(name).complete), "")

    def unseal(self, name: str) -> None:
        """Marks a checkpoint as unfinished."""
        self.files.pipe_file(self._marker(name), marker.UNFINISHED.encode())

    def put(self, folder: Path, name: str) -> None:
        """Uploads a file of one of the run's folders."""
        self.files.put_file(str(folder / name), f"{self.root}/{folder.name}/{name}")

    def seal(self, checkpoint: Path, machine: int = 0, machines: int = 1) -> bool:
        """Marks a checkpoint as complete, or returns False: another machine has not uploaded its files.

        Call once the files of this machine are there. The first machine uploads the marker, each other one a copy,
        which shows that its files belong to that marker.
        """
        name, content, others = checkpoint.name, marker.content_of(checkpoint), range(1, 1 if machine else machines)
        if content is None or any(self.marker_of(name, other) != content for other in others):
            return False
        self.files.pipe_file(self._marker(name, machine), content)
        if others:
            self.files.rm([self._marker(name, other) for other in others])
        return True

    def retire(self, keep: int | None, best: str | None) -> None:
        """Deletes what `completeness.retire` would delete of a folder of this machine, the marker first."""
        for name in completeness.outdated(self.checkpoints(), lambda name: self.written(name).complete, keep, best):
            self.unseal(name)
            self.files.rm(f"{self.root}/{name}", recursive=True)

    def get(self, name: str, run: Path, needed: Callable[[str], bool] = bool) -> None:
        """Fetches the `needed` files of a checkpoint, and the model's description, into a run's folder.

        Raises:
            UserError: it isn't complete, the disk is too small for it, or its bytes have changed. Nothing is left of it
            then.
        """
        written = self.written(name)
        if not name or not written.complete:
            raise UserError(
                f"{self.uri}/{name} is not a complete checkpoint",
                why="its upload has not ended, or there is none",
                fix="the URI of a run, as given to train/sft.py --checkpoint_uri, or of a checkpoint-N in it",
            )
        sizes = {file: size for file, size in written.sizes.items() if needed(file)}
        disks.check_room(run, sum(sizes.values()), f"{name} takes", "it can't be fetched", "free some space there")
        console.say(f"fetching {name} from {self.uri}", style="cyan")
        with atomic_files.replaced_folder(run / name) as folder:
            lost = min(sizes.keys() - self.names(name), default="")
            if not lost:
                self._get(name, [*sizes, file_names.MARKER], folder)
            if damage := f"{lost} is missing" if lost else marker.damage(folder, needed):
                raise Damaged(f"{self.uri}/{name}: {damage}", why="it isn't what was written", fix="an older one")
        if not (run / file_names.DESCRIBED).exists():
            self._get(file_names.DESCRIBED, self.names(file_names.DESCRIBED), run / file_names.DESCRIBED)

    def _get(self, name: str, files: list[str], target: Path) -> None:
        self.files.get([f"{self.root}/{name}/{file}" for file in files], [str(target / file) for file in files])

    def _marker(self, name: str, machine: int = 0) -> str:
        return f"{self.root}/{name}/{file_names.MARKER}" + (f".{machine}" if machine else "")
