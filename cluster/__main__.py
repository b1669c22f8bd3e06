"""The command line: `python -m cluster up|down|status|power-off|power-on|load|build|build-images`."""

import argparse
import subprocess
import sys
from collections.abc import Sequence

from cluster.errors import ClusterError
from cluster.settings import Settings


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    defaults = Settings()
    top = argparse.ArgumentParser(
        prog="python -m cluster", description="Start and control a real Kubernetes cluster on this machine (root)."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start the cluster, or the parts of it that do not run")
    up.add_argument("--nodes", type=int, default=defaults.num_nodes, metavar="N", help="default %(default)s")
    up.add_argument(
        "--gpus", type=int, default=defaults.num_gpus, metavar="N", help="fake nvidia.com/gpu capacity of each node"
    )
    up.add_argument(
        "--node-grace-s",
        type=int,
        default=defaults.node_grace_s,
        metavar="S",
        help="seconds of silence until a node is NotReady, default %(default)s",
    )
    up.add_argument(
        "--toleration-s",
        type=int,
        default=defaults.toleration_s,
        metavar="S",
        help="seconds that pods stay bound to a NotReady node, default %(default)s",
    )
    commands.add_parser("down", help="stop the cluster and remove its state; caches stay")
    commands.add_parser("status", help="print nodes, processes and the path of the kubeconfig")
    for command, text in (("power-off", "cut a node's power"), ("power-on", "restore a node's power")):
        commands.add_parser(command, help=text).add_argument("node", metavar="NODE", help="n1, n2, ...")
    load = commands.add_parser("load", help="load images into the nodes: built ones, or your own from an archive")
    load.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="operator, trainer, their full names, or the tar file of an image (`docker save`, or an OCI layout)",
    )
    load.add_argument("--name", metavar="NAME", help="image name for an archive; default: the name it was saved with")
    commands.add_parser(
        "build", help="build the programs (kube-apiserver, kubectl, helm, ...) and print their directory"
    )
    images = commands.add_parser("build-images", help="build Regroup's images and load them into the nodes")
    images.add_argument("images", nargs="*", metavar="IMAGE", default=["operator", "trainer"], help="default both")
    return top


def run(arguments: argparse.Namespace) -> int:
    """Run one command and return its exit status."""
    from cluster import binaries, paths

    if arguments.command == "build":  # before `make venv` has installed what the other commands import
        print(binaries.ensure())
        return 0
    from cluster import lifecycle

    match arguments.command:
        case "up":
            lifecycle.up(
                Settings(arguments.nodes, arguments.gpus, arguments.node_grace_s, arguments.toleration_s),
            )
            if not lifecycle.context():
                print(f"export KUBECONFIG={paths.kubeconfig()}")
        case "down":
            lifecycle.down()
        case "status":
            return lifecycle.status()
        case "power-off":
            lifecycle.power_off(arguments.node)
        case "power-on":
            lifecycle.power_on(arguments.node)
        case "load":
            lifecycle.load(arguments.images, arguments.name)
        case "build-images":
            lifecycle.build_images(arguments.images)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. An error is one sentence on standard error."""
    try:
        return run(parser().parse_args(arguments))
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        print(f"cluster: `{' '.join(map(str, error.cmd))}` failed with status {error.returncode}.", file=sys.stderr)
    except ModuleNotFoundError as error:
        print(f"cluster: the Python package {error.name} is missing: run `make venv` first.", file=sys.stderr)
    except PermissionError as error:
        whose = error.filename or "A process of it"
        print(
            f"cluster: {whose} belongs to another user: run this with `sudo -E`, or set REGROUP_CLUSTER_DIR to a directory of "
            "your own.",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        print("cluster: interrupted. Run the same command again to continue.", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
