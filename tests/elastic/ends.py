"""A member that ends while a view is being connected: python -m tests.elastic.ends MODE FOLDER

The second member of the view never connects. MODE: "close" calls `Members.close`, "exit" leaves this to the exit.
Prints the threads of the members that are left at the end of the exit.
"""

import atexit
import sys
import threading
import time
from pathlib import Path

TOKEN = b"a secret of the test"


def left() -> None:
    names = [each.name for each in threading.enumerate()]
    print("left:", [name for name in names if name.startswith(("commlib view", "commlib member", "commlib donor"))])


def main(mode: str, folder: str) -> None:
    atexit.register(left)  # runs after the functions that are registered later
    import torch

    import commlib
    from commlib.elastic.membership import Membership
    from commlib.elastic.registry import Rules
    from commlib.elastic.service import Service
    from commlib.elastic.views import Join

    service = Service("127.0.0.1", 0, TOKEN, Path(folder) / "journal", Rules(is_fresh=True))
    threading.Thread(target=service.run, daemon=True).start()
    address = "{}:{}".format(*service.address)
    members = commlib.elastic.join(address, token=TOKEN)
    model = torch.nn.Linear(2, 2)
    commlib.wrap(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), process_group=members)
    strange = Membership(address, TOKEN, Join("strange", "", "", 1, 60.0), 60.0)
    while strange.joining is None:
        time.sleep(0.01)
    strange.ready(strange.joining.number)
    while not any(each.name == "commlib view 2" for each in threading.enumerate()):
        time.sleep(0.01)
    print("connecting")
    if mode == "close":
        members.close()
    strange.close()
    if mode == "close":
        left()


if __name__ == "__main__":
    main(*sys.argv[1:])
