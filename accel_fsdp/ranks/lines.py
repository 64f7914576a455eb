"""Finds the script's line that explains another one, by its words: what clears gradients, or keeps them on a rank."""

import linecache


def nearest(line: str, *words: str) -> str:
    """The line with one of `words` that is nearest to `line`, both as file:line; `line` itself if there is none."""
    path, _, number = line.rpartition(":")
    lines = enumerate(linecache.getlines(path), 1)
    places = [at for at, text in lines if any(word in text for word in words)]
    return f"{path}:{min(places, key=lambda at: abs(at - int(number)))}" if places else line
