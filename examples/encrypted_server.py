"""The server: weights, no secret key. python examples/encrypted_server.py digits.program 8000"""

import sys

from multilinear.encrypted import Program
from multilinear.encrypted.service import Service, make_server

service = Service(Program.load(sys.argv[1]))
with make_server(service, port=int(sys.argv[2])) as server:
    print(f"listening on port {server.server_address[1]}", flush=True)
    server.serve_forever()
