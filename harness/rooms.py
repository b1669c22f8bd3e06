"""Draws the rooms of a package and their imports: `python -m harness.rooms PACKAGE FILE.svg [REVISION]`.

It made four pictures in docs/design:

- rooms-before.svg, of 9c24f84^, the last revision with one room `elastic`, and rooms-after.svg;
- operator-before.svg, of 689306f, the last revision with one class for the whole plan, and operator-after.svg.

A room is a folder, with a list of its files. Files that import each other in a circle are red. An arrow goes from a
room to one that it imports. An arrow that follows from other arrows is left out.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from graphlib import TopologicalSorter
from html import escape
from itertools import product
from pathlib import Path

import grimp

REPOSITORY = Path(__file__).resolve().parents[1]
WIDTH, LINE, GAP = 190, 15, 60
FONT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass(frozen=True)
class Package:
    """A package and its place in the repository.

    `leaves` are files directly in the package that stand below the rooms. `houses` are folders whose own folders are
    rooms.
    """

    name: str
    root: str
    leaves: tuple[str, ...]
    houses: tuple[str, ...] = ()


LIBRARY = Package("regroup", "trainer-image", ("accelerator", "errors", "layout", "strategies"))
OPERATOR = Package("regroup_operator", "operator", ("retries",), ("plan",))


def room_of(module: str, package: Package) -> str:
    """Return the room of a module, which is its folder. Files directly in the package are one room, except for its leaves."""
    parts = module.split(".")
    if len(parts) > 2:
        return "/".join(parts[1:-1]) if parts[1] in package.houses else parts[1]
    return parts[1] if parts[1] in package.leaves else package.name


def imports(package: Package, revision: str | None) -> dict[str, set[str]]:
    """Map each module to the modules that it imports, also only for types. `revision` None reads the working tree."""
    with tempfile.TemporaryDirectory() as directory:
        root = REPOSITORY / package.root
        if revision is not None:
            archive = subprocess.run(
                ["git", "-C", REPOSITORY, "archive", revision, package.root], check=True, stdout=subprocess.PIPE
            )
            subprocess.run(["tar", "-x", "-C", directory], input=archive.stdout, check=True)
            root = Path(directory) / package.root
        sys.path.insert(0, str(root))
        graph = grimp.build_graph(package.name, cache_dir=None)
    modules = graph.modules - {package.name}
    named = {module: f"{module}.__init__" if graph.find_children(module) else module for module in modules}
    return {
        named[module]: {named[target] for target in graph.find_modules_directly_imported_by(module) & modules}
        for module in sorted(modules)
    }


def circles(edges: dict[str, set[str]]) -> set[str]:
    """Return the nodes that can be reached from themselves."""
    reach = {node: set(targets) for node, targets in edges.items()}
    for via, node in product(edges, edges):
        if via in reach[node]:
            reach[node] |= reach[via]
    return {node for node in edges if node in reach[node]}


def needed(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the edges without those that follow from other edges. If there is a circle, return all."""
    reach = {node: set(targets) for node, targets in edges.items()}
    for via, node in product(edges, edges):
        if via in reach[node]:
            reach[node] |= reach[via]
    if any(node in reach[node] for node in edges):
        return edges
    return {node: {t for t in ts if not any(t in reach[other] for other in ts)} for node, ts in edges.items()}


def layers(edges: dict[str, set[str]], circular: set[str]) -> list[list[str]]:
    """Return rooms in rows: each below the rooms that import it. Arrows between two rooms of a circle do not count."""
    order = {room: {t for t in targets if not (room in circular and t in circular)} for room, targets in edges.items()}
    height: dict[str, int] = {}
    for room in TopologicalSorter(order).static_order():
        height[room] = max((height[t] + 1 for t in order[room]), default=0)
    return [sorted(r for r in height if height[r] == h) for h in sorted(set(height.values()), reverse=True)]


def draw(package: Package, modules: dict[str, set[str]]) -> str:
    """Return the picture as SVG."""
    rooms: dict[str, list[str]] = defaultdict(list)
    between: dict[str, set[str]] = {}
    for module, targets in modules.items():
        rooms[room_of(module, package)].append(module)
        between.setdefault(room_of(module, package), set()).update(
            {room_of(t, package) for t in targets} - {room_of(module, package)}
        )
    files = {room: sorted(m for m in inside if not m.endswith("__init__")) for room, inside in rooms.items()}
    in_circle, rooms_in_circle = circles(modules), circles(between)
    boxes: dict[str, tuple[float, float, float]] = {}
    rows, y = layers(between, rooms_in_circle), 20.0
    width = max(len(row) for row in rows) * (WIDTH + GAP) + GAP
    for row in rows:
        tallest = max(LINE * (len(files[room]) + 2) for room in row)
        for i, room in enumerate(row):
            boxes[room] = (width * (i + 0.5) / len(row) - WIDTH / 2, y, LINE * (len(files[room]) + 2))
        y += tallest + GAP
    out = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {y:.0f}' {FONT} font-size='11'>",
        "<defs><marker id='tip' markerWidth='8' markerHeight='8' refX='7' refY='3' orient='auto'>"
        "<path d='M0,0 L7,3 L0,6 z' fill='context-stroke'/></marker></defs>",
        f"<rect width='{width:.0f}' height='{y:.0f}' fill='white'/>",
    ]
    for room, targets in needed(between).items():
        for target in sorted(targets):
            (x1, y1, h1), (x2, y2, _) = boxes[room], boxes[target]
            red = room in rooms_in_circle and target in rooms_in_circle
            down = y2 > y1
            begin, end = (y1 + h1, y2) if down else (y1, y2 + boxes[target][2])
            out.append(
                f"<line x1='{x1 + WIDTH / 2:.0f}' y1='{begin:.0f}' x2='{x2 + WIDTH / 2:.0f}' y2='{end:.0f}' "
                f"stroke='{'#c00' if red else '#8a94a6'}' stroke-width='1.2' marker-end='url(#tip)'/>"
            )
    for room, (x, top, height) in boxes.items():
        out.append(
            f"<rect x='{x:.0f}' y='{top:.0f}' width='{WIDTH}' height='{height:.0f}' rx='5' fill='#f4f6fa' stroke='#44506a'/>"
            f"<text x='{x + 10:.0f}' y='{top + LINE:.0f}' font-weight='bold'>{escape(room)}/</text>"
        )
        for i, module in enumerate(files[room]):
            name, red = module.rsplit(".", 1)[-1], module in in_circle
            out.append(
                f"<text x='{x + 18:.0f}' y='{top + LINE * (i + 2):.0f}' fill='{'#c00' if red else '#222'}'>"
                f"{escape(name)}.py{' (circle)' if red else ''}</text>"
            )
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    package = next((one for one in (LIBRARY, OPERATOR) if sys.argv[1:2] == [one.name]), None)
    if package is None or len(sys.argv) not in (3, 4):
        raise SystemExit((__doc__ or "").split("\n")[0])
    Path(sys.argv[2]).write_text(draw(package, imports(package, sys.argv[3] if len(sys.argv) == 4 else None)))


if __name__ == "__main__":
    main()
