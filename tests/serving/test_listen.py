"""Where a server listens: Unix sockets, TLS, certificates that change."""

from __future__ import annotations

import asyncio
import resource
import shutil
import socket
import ssl
import subprocess
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from llmjax.errors import ConfigError
from llmjax_serving import watch
from llmjax_serving.config import ServerConfig
from llmjax_serving.listen import bind, raise_file_limit, tls_context

from .double import EngineDouble, run_async, until
from .test_server import running, send_signal

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def make_certificate(folder, name: str) -> tuple[str, str]:
    """A self-made certificate for `name`, and its key."""
    files = [str(folder / f"{name}.{part}") for part in ("crt", "key")]
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    named = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command.split(), *named, "-out", files[0], "-keyout", files[1]],
        check=True,
        capture_output=True,
    )
    return files[0], files[1]


async def shown_certificate(url) -> bytes:
    """What a connection made now is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(url.host, url.port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


@needs_openssl
@run_async
async def test_tls_with_a_certificate_that_changes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.01)
    one, other = make_certificate(tmp_path, "one"), make_certificate(tmp_path, "other")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    shutil.copy(one[0], cert)
    shutil.copy(one[1], key)
    ders = [ssl.PEM_cert_to_DER_cert(Path(pair[0]).read_text()) for pair in (one, other)]
    config = {"ssl_certfile": cert, "ssl_keyfile": key}
    async with running(EngineDouble, **config) as (session, ready, task, _):
        await ready.wait()
        url, trust = session._base_url, ssl.create_default_context(cafile=one[0])
        async with session.get(f"https://{url.host}:{url.port}/health", ssl=trust) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await session.get("/health")  # not TLS
        assert await shown_certificate(url) == ders[0]
        shutil.copy(other[0], cert)  # for a moment the two do not belong together
        await until(lambda: "the certificate stays as it was" in caplog.text)
        assert await shown_certificate(url) == ders[0]
        shutil.copy(other[1], key)
        for _ in range(2000):
            await asyncio.sleep(0.01)
            if await shown_certificate(url) == ders[1]:
                break
        else:
            raise AssertionError("the new certificate is not shown")
        send_signal()
        assert await task == 0


@needs_openssl
def test_certificates_of_no_use_are_refused_at_the_start(tmp_path):
    one, other = make_certificate(tmp_path, "one"), make_certificate(tmp_path, "other")
    locked = str(tmp_path / "locked.key")
    command = ["openssl", "ec", "-aes256", "-passout", "pass:s3cret", "-in", one[1], "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    for cert, key in (
        (one[0], other[1]),
        (one[0], str(tmp_path / "none")),
        (one[0], None),
        (one[1], one[1]),
        (one[0], locked),
    ):
        with pytest.raises(ConfigError, match="TLS cannot use"):
            tls_context(ServerConfig(ssl_certfile=cert, ssl_keyfile=key))
    both = tmp_path / "both.pem"
    both.write_text(Path(one[0]).read_text() + Path(one[1]).read_text())
    assert tls_context(ServerConfig(ssl_certfile=str(both))) is not None
    assert tls_context(ServerConfig()) is None


@run_async
async def test_a_unix_socket(tmp_path):
    path = str(tmp_path / "llmjax.sock")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)  # left behind by a server that was killed
    async with running(EngineDouble, port=8000, uds=path) as (_, ready, task, _):
        await ready.wait()
        connector = aiohttp.UnixConnector(path)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as session:
            response = await session.post("/v1/completions", json={"prompt": "a"})
            assert response.status == 200
        with pytest.raises(ConfigError, match="already in use"):
            bind(ServerConfig(uds=path))
        send_signal()
        assert await task == 0
    assert not (tmp_path / "llmjax.sock").exists()


def test_what_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="which is no socket"):
        bind(ServerConfig(uds=str(path)))
    assert path.read_text() == "data"
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind(ServerConfig(uds=str(tmp_path / "no" / "folder")))
    with closing(bind(ServerConfig(uds=str(tmp_path / "new")))) as sock:
        assert sock.family == socket.AF_UNIX


def test_there_may_be_more_connections_than_files_by_default(monkeypatch):
    limits, most = [100, 200], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: most.append(new))
    raise_file_limit()
    limits[1] = resource.RLIM_INFINITY
    raise_file_limit()
    limits[0] = 10**6  # never lowered
    raise_file_limit()
    assert most == [(200, 200), (65_536, resource.RLIM_INFINITY)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"uds": "x", "port": 81}, "uds and host or port were given"),
        ({"uds": "x", "host": "::"}, "uds and host or port were given"),
        ({"ssl_keyfile": "x"}, "ssl_keyfile needs ssl_certfile"),
        ({"client_timeout": 0.0}, "client_timeout is 0.0, allowed"),
        ({"access_log_format": "xml"}, "access_log_format is 'xml', allowed: text, json"),
        ({"api_key": ("a", "a")}, "or one twice"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**options)
