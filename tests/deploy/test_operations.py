"""docs/operations.md: the walk through Kubernetes, command by command, as far as it goes without a cluster."""

import base64
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import kubernetes_validate
import pytest
import yaml
from cryptography import x509

from tei_grpc.commands import health
from tests.checkpoints import bert_t
from tests.deploy.manifests import KUBECTL, ROOT, Manifests, need_kubectl, render
from tests.e2e.envoy import TLS_MARK
from tests.e2e.servers import Server, free_port

TEXT = (ROOT / "docs" / "operations.md").read_text()
SECTIONS = ("Kubernetes", "Day two", "Image")
VERSION = kubernetes_validate.latest_version()
GRPCURL = Path(sys.executable).with_name("grpcurl")

HERE = ("openssl ", "printf ", "sed ", "tail ", "kubectl kustomize ")
NEED_A_CLUSTER = ("mkdir ", "docker ", "helm ", "kubectl get --raw ", "kubectl -n tei ", "for pod in $(kubectl -n tei ")


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    need_kubectl()


def blocks(language: str) -> list[str]:
    """The code of the sections that tell the walk, in their order."""
    parts = [TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0] for title in SECTIONS]
    return [
        code for part in parts for code in re.findall(rf"^```{language}\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
    ]


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines() if line]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> "Walk":
    folder = tmp_path_factory.mktemp("walk")
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    [example] = blocks("yaml")
    (folder / "tei").mkdir()
    (folder / "tei" / "kustomization.yaml").write_text(example)
    walk = Walk(folder)
    for command in commands():
        walk.take(command)
    return walk


class Walk:
    """Somebody who follows the document in `folder`, with the files of the repository that it names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secrets: dict[str, dict] = {}
        self.applied: list[dict] = []
        self.calls: list[str] = []
        self.unknown: list[str] = []
        self.needing_a_cluster: list[str] = []

    def take(self, command: str) -> None:
        if command.startswith("kubectl -n tei create secret "):
            [secret] = self.objects(f"{command.partition(' --dry-run')[0]} --dry-run=client -o yaml")
            self.secrets[secret["metadata"]["name"]] = secret
        elif command.startswith("kubectl apply -k "):
            self.applied += render(self.folder / command.split()[-1]).objects
        elif command.startswith("kubectl apply -f "):
            self.applied += yaml.safe_load_all((self.folder / command.split()[-1]).read_text())
        elif command.startswith("grpcurl "):
            self.calls.append(command)
        elif command.startswith(HERE):
            self.run(command)
        elif command.startswith(NEED_A_CLUSTER):
            self.needing_a_cluster.append(command)
        else:
            self.unknown.append(command)

    def objects(self, command: str) -> list[dict]:
        return list(yaml.safe_load_all(self.run(command)))

    def run(self, command: str) -> str:
        path = f"{Path(KUBECTL).parent}:{os.environ['PATH']}"
        run = subprocess.run(
            ["bash", "-ec", command],
            cwd=self.folder,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode == 0, f"{command}: {run.stderr}"
        return run.stdout


def test_no_command_is_left_out(walk: Walk) -> None:
    assert walk.unknown == []


def test_what_is_applied_is_valid(walk: Walk) -> None:
    kinds = {object["kind"] for object in walk.applied}
    assert {"Namespace", "Deployment", "PodMonitor", "PrometheusRule"} <= kinds
    for object in [*walk.applied, *walk.secrets.values()]:
        if object["kind"] not in ("PodMonitor", "PrometheusRule"):
            object["metadata"].pop("creationTimestamp", None)  # null, as old versions of kubectl print it
            kubernetes_validate.validate(object, VERSION, strict=True)


def test_rule_holds_our_alerts(walk: Walk) -> None:
    [rule] = [object for object in walk.applied if object["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())


def test_secrets_have_what_the_pod_mounts(walk: Walk) -> None:
    assert {name: set(secret["data"]) for name, secret in walk.secrets.items()} == {
        "tei-api-keys": {"keys"},
        "tei-tls": {"tls.crt", "tls.key"},
        "tei-hub": {"token"},
    }


def test_overlay_of_ones_own_says_model_image_and_memory(walk: Walk) -> None:
    manifests = Manifests(walk.applied)
    assert manifests.options["MODEL_ID"] == "intfloat/multilingual-e5-base"
    assert manifests.options["TLS_CERT"] == "/etc/tei/tls/tls.crt"
    assert manifests.container["image"] == "ghcr.io/you/tei-grpc:1.0.0-cpu"
    assert manifests.container["resources"]["limits"] == {"cpu": "4", "memory": "4Gi"}


def test_image_that_is_pushed_is_the_one_that_is_deployed(walk: Walk) -> None:
    builds = [shlex.split(command) for command in walk.needing_a_cluster if command.startswith("docker ")]
    tagged = {words[words.index("-t") + 1] for words in builds if "--push" in words}
    pushed = {words[-1] for words in builds if words[:2] == ["docker", "push"]}
    assert tagged | pushed == {Manifests(walk.applied).container["image"]}


def test_key_that_is_taken_out_is_the_old_one(walk: Walk) -> None:
    [key] = (walk.folder / "keys").read_text().splitlines()
    newest = base64.b64decode(walk.secrets["tei-api-keys"]["data"]["keys"]).decode().splitlines()
    assert len(newest) == 2
    assert newest[1] == key


def test_rotation_waits_for_the_files_that_the_pod_mounts(walk: Walk) -> None:
    [loop] = [command for command in walk.needing_a_cluster if command.startswith("for pod ")]
    assert subprocess.run(["bash", "-n", "-c", loop]).returncode == 0
    assert f" cat {Manifests(walk.applied).options['API_KEY_FILE']} | cmp -s - keys" in loop
    assert loop.index("cmp") < loop.index("kill -HUP")


def test_envoy_asks_for_a_name_of_the_certificate(walk: Walk) -> None:
    text = (ROOT / "deploy" / "envoy" / "envoy.yaml").read_text().replace(TLS_MARK, "")
    [cluster] = yaml.safe_load(text)["static_resources"]["clusters"]
    tls = cluster["transport_socket"]["typed_config"]
    [name] = tls["common_tls_context"]["validation_context"]["match_typed_subject_alt_names"]
    certificate = x509.load_pem_x509_certificate((walk.folder / "tls.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {tls["sni"], name["matcher"]["exact"]} <= set(names.get_values_for_type(x509.DNSName))


def test_commands_for_the_cluster_name_what_is_there(walk: Walk) -> None:
    there = {f"{object['kind'].lower()}/{object['metadata']['name']}" for object in walk.applied}
    named = [
        name for command in walk.needing_a_cluster for name in re.findall(r"\b(?:deployment|service)/\w+", command)
    ]
    assert named
    assert set(named) <= there
    files = [word for command in walk.needing_a_cluster for word in shlex.split(command) if word.startswith("deploy/")]
    assert all((ROOT / file).is_file() for file in files)


def test_every_alert_is_explained() -> None:
    alerts = re.findall(r"alert: (\w+)", (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    assert re.findall(r"^\| (Tei\w+) \|", TEXT, re.MULTILINE) == alerts


class Served(NamedTuple):
    """A running server."""

    server: Server
    health_port: int


@pytest.fixture(scope="module")
def served(walk: Walk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server with the options, the keys and the certificate of the walk; the model is a tiny one."""
    model = bert_t(tmp_path_factory.mktemp("model"))
    places = {"TLS_CERT": "tls.crt", "TLS_KEY": "tls.key", "API_KEY_FILE": "keys"}
    options = Manifests(walk.applied).options | {name: str(walk.folder / file) for name, file in places.items()}
    health_port = free_port()
    server = Server(**(options | {"HEALTH_PORT": str(health_port), "MODEL_ID": str(model)}))
    try:
        yield Served(server.wait_until_ready(), health_port)
    finally:
        server.kill()


def test_call_of_the_walk_is_answered(walk: Walk, served: Served) -> None:
    for call in walk.calls:
        here = call.replace("grpcurl", str(GRPCURL), 1).replace("localhost:3000", f"localhost:{served.server.port}")
        assert '"embeddings"' in walk.run(here)
    assert walk.calls


def test_probes_are_answered_in_plaintext_beside_tls(walk: Walk, served: Served) -> None:
    container = Manifests(walk.applied).container
    for kind in ("startup", "readiness", "liveness"):
        service = container[f"{kind}Probe"]["grpc"].get("service", "")
        assert health.check(f"127.0.0.1:{served.health_port}", service=service, timeout=5) == 0
