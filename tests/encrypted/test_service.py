import http.client
import json
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest

from multilinear.encrypted import Client, Public, messages
from multilinear.encrypted.service import MOST_CLIENTS, Service, make_server
from multilinear.errors import MultilinearError


@pytest.fixture(scope="module")
def http_service(small):
    service = Service(small.program, processes=1)
    server = make_server(service, port=0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield SimpleNamespace(service=service, port=server.server_port)
    server.shutdown()
    thread.join()
    server.server_close()


def ask(served, path, body=None):
    url = f"http://127.0.0.1:{served.port}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def ask_bare(served, path, *headers, body=b"", method="POST"):
    """A request of exactly these headers; the sending side is closed after `body`."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.putrequest(method, path)
    for name, value in headers:
        connection.putheader(name, value)
    connection.endheaders(body)
    connection.sock.shutdown(1)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


@pytest.fixture
def still_well(small, http_service):
    """After the test, a new client is served from the start."""
    yield
    status, text = ask(http_service, "/program")
    assert status == 200
    client = Client(Public.from_dict(json.loads(text)))
    status, owner = ask(http_service, "/keys", client.keygen())
    assert (status, owner.decode()) == (200, client.keys.hex())
    status, answer = ask(http_service, "/run", client.encrypt(small.images[:2]))
    assert status == 200
    assert np.abs(client.decrypt(answer) - small.logits[:2]).max() < 20 * small.public.error


def test_a_client_is_served(still_well):
    pass


def test_the_program_is_told_without_weights(small, http_service):
    status, text = ask(http_service, "/program")
    assert status == 200 and Public.from_dict(json.loads(text)) == small.public
    assert len(text) < 3000


@pytest.mark.usefixtures("still_well")
@pytest.mark.parametrize("path", ["/keys", "/run"])
def test_garbage_is_a_bad_request(http_service, path):
    for body in (b"x", b"MULTILIN" + bytes(200), b"\xff" * 5000):
        status, text = ask(http_service, path, body)
        assert status == 400 and (b"expected" in text or b"version" in text) and b"\n" not in text


@pytest.mark.usefixtures("still_well")
def test_messages_of_another_kind_or_owner_are_bad_requests(small, http_service, encrypted):
    stranger = Client(small.public)
    stranger.keygen()
    status, text = ask(http_service, "/run", stranger.encrypt(small.images[:1]))
    assert status == 400 and b"no evaluation keys" in text and b"send them to /keys first" in text
    assert ask(http_service, "/run", small.keys[:5000])[0] == 400
    assert ask(http_service, "/keys", encrypted)[0] == 400
    assert ask(http_service, "/keys", stranger.secret())[0] == 400


@pytest.mark.usefixtures("still_well")
@pytest.mark.parametrize("path", ["/", "/none", "/keys/", "/program?x", "/%00", "/../program"])
def test_unknown_paths_are_not_found(http_service, path):
    assert ask(http_service, path)[0] == 404
    assert ask(http_service, path, b"x")[0] == 404


@pytest.mark.usefixtures("still_well")
@pytest.mark.parametrize("path", ["/keys", "/run", "/none"])
def test_lengths_that_are_missing_or_absurd_are_refused_unread(http_service, path):
    assert ask_bare(http_service, path)[0] == 411
    assert ask_bare(http_service, path, ("Content-Length", "many"))[0] == 411
    assert ask_bare(http_service, path, ("Transfer-Encoding", "chunked"))[0] == 411
    for length in (http_service.service.limit(path) + 1, 2**40, 10**30, -1):
        status, text = ask_bare(http_service, path, ("Content-Length", str(length)))
        assert status == 413 and b"at most" in text


@pytest.mark.usefixtures("still_well")
def test_a_body_that_ends_early_is_a_bad_request(http_service):
    status, text = ask_bare(http_service, "/run", ("Content-Length", "5000"), body=b"x" * 100)
    assert (status, text) == (400, b"the message is truncated")


@pytest.mark.usefixtures("still_well")
def test_other_methods_are_refused(http_service):
    assert ask_bare(http_service, "/run", ("Content-Length", "0"), method="PUT")[0] == 501


@pytest.mark.usefixtures("still_well")
def test_a_fault_inside_is_told_without_its_details(http_service, monkeypatch):
    def fail(path, body):
        raise RuntimeError("the inside")

    with monkeypatch.context() as patched:
        patched.setattr(http_service.service, "handle", fail)
        status, text = ask(http_service, "/run", b"x")
    assert status == 500 and b"inside" not in text


def test_the_client_not_seen_for_longest_is_forgotten(small):
    service = Service(small.program, 1)
    clients = [Client(small.public) for _ in range(MOST_CLIENTS + 1)]
    for client in clients[:-1]:
        assert service.handle("/keys", client.keygen())[0] == 200
    image = small.images[:1]
    assert service.handle("/run", clients[0].encrypt(image))[0] == 200
    service.handle("/keys", clients[-1].keygen())
    assert len(service.clients) == MOST_CLIENTS
    assert service.handle("/run", clients[1].encrypt(image)) == (
        400,
        f"no evaluation keys {clients[1].keys.hex()[:8]} here; send them to /keys first".encode(),
    )
    assert service.handle("/run", clients[0].encrypt(image))[0] == 200


def test_one_clients_working_memory_is_kept_at_a_time(small):
    service = Service(small.program, 1)
    clients = [Client(small.public) for _ in range(2)]
    for client in clients:
        service.handle("/keys", client.keygen())
    for client in clients:
        assert service.handle("/run", client.encrypt(small.images[:1]))[0] == 200
    kept = [service.clients[client.keys][1]._engine is not None for client in clients]
    assert kept == [False, True]


def test_every_good_message_is_within_the_limits(small, encrypted):
    service = Service(small.program, 1)
    assert len(small.keys) <= service.limit("/keys") and len(encrypted) <= service.limit("/run")
    assert service.limit("/elsewhere") == messages.HEADER_BYTES


def test_a_port_in_use_is_told(small, http_service):
    with pytest.raises(MultilinearError, match="cannot listen on 127.0.0.1"):
        make_server(Service(small.program, 1), port=http_service.port)
