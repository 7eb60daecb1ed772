"""The client: images and the secret key, no weights. python examples/encrypted_client.py http://127.0.0.1:8000"""

import sys
import tempfile
from pathlib import Path
from urllib.request import urlopen

from multilinear.data import load_dataset
from multilinear.encrypted import Client, Public

server = sys.argv[1]
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "client.json"
    file.write_bytes(urlopen(f"{server}/program").read())
    client = Client(Public.load(file))

digits = load_dataset("digits").test
urlopen(f"{server}/keys", client.keygen()).read()
answer = urlopen(f"{server}/run", client.encrypt(digits.images[:20])).read()
logits = client.decrypt(answer)
print("digits:", digits.labels[:20].tolist())
print("found: ", logits.argmax(1).tolist())
