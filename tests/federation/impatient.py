"""Start a SuperNode that asks for work every half second, and is missed after 20 seconds instead of 60.

    python impatient.py flower-supernode --superlink …

Flower has no options for these two waits, of which a test with several rounds, or with a node that dies, consists
for the most part. Nothing else is changed, and the client processes that the node starts are as always.
"""

import sys
import time

from flwr.supercore import heartbeat
from flwr.supernode import fleet_http_connection
from flwr.supernode.cli import flower_supernode

# The shortest that a SuperLink accepts. Only the node's own heartbeat is meant: that of its client processes is
# counted by other modules, and stays.
fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = 10
heartbeat.HEARTBEAT_DEFAULT_INTERVAL = 10

_sleep = time.sleep
time.sleep = lambda seconds: _sleep(min(seconds, 0.5))

if __name__ == "__main__":
    del sys.argv[0]
    sys.exit(flower_supernode())
