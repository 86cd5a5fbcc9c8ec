"""Regenerates the committed stubs from the .proto files, or checks that they are current.

Run from the project's root: `python -m protos.generate` or `python -m protos.generate --check`. Needs the
`dev` extra, whose grpcio-tools version is pinned because its output differs between versions.
"""

import argparse
import filecmp
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import google.rpc

FOLDER = Path(__file__).parent


def generate(destination: Path) -> list[Path]:
    """Write the stubs of every .proto under `destination`; returns their paths relative to it."""
    from grpc_tools import protoc

    root = FOLDER.parent
    arguments = [
        "protoc",
        f"--proto_path={root}",
        f"--proto_path={Path(google.rpc.__path__[0]).parents[1]}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={destination}",
        f"--pyi_out={destination}",
        f"--grpc_python_out={destination}",
        *sorted(str(path.relative_to(root)) for path in FOLDER.glob("*.proto")),
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed; see its message above")
    return sorted(path.relative_to(destination) for path in destination.glob("protos/*_pb2*.py*"))


def main() -> None:
    """Generate in place, or compare a fresh generation with what is committed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a stub is not current")
    if not parser.parse_args().check:
        generate(FOLDER.parent)
        return
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
        committed = sorted(path.relative_to(FOLDER.parent) for path in FOLDER.glob("*_pb2*.py*"))
        stale = [
            str(path)
            for path in sorted({*fresh, *committed})
            if path not in fresh
            or path not in committed
            or not filecmp.cmp(Path(scratch) / path, FOLDER.parent / path, shallow=False)
        ]
    if stale:
        sys.exit(f"not current: {', '.join(stale)}; run `python -m protos.generate` and commit the result")


if __name__ == "__main__":
    main()
