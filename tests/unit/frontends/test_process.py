from pathlib import Path

from tei_grpc.config import Settings
from tei_grpc.frontends.files import SharedFiles
from tei_grpc.frontends.process import Job


def test_a_front_end_gets_all_options_secrets_included():
    given = {
        "model_id": "m",
        "api_key": "SESAME",
        "hf_api_token": "hf_x",
        "tls_cert": "/c.pem",
        "tls_key": Path("/k.pem"),
    }
    settings = Settings.model_validate({**given, "frontends": 3, "listen": ("127.0.0.1:1",), "shutdown_delay": 0.5})
    job = Job(settings, 2, SharedFiles(5, 6), 7, True)
    read = Job.from_json(job.to_json())
    assert read[1:] == job[1:]
    assert read.settings.model_dump(exclude={"hf_api_token"}) == settings.model_dump(exclude={"hf_api_token"})
    assert read.settings.hf_token is not None
    assert read.settings.hf_token.get_secret_value() == "hf_x"
    assert read.settings.api_keys() == ("SESAME",)
