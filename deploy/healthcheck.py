"""The image's HEALTHCHECK: exit code 0 if the server's liveness route answers 200, else 1 with the reason.

Standard library alone, and no proxy. NEOSERVE_HEALTH_URL names another address, for a server started with another
port; /health in place of /health/live also demands that the model is loaded.
"""

from __future__ import annotations

import http.client
import os
import sys
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:8000/health/live"
TIMEOUT_SECONDS = 3.0


def main() -> int:
    """Asks once; Docker itself repeats."""
    url = os.environ.get("NEOSERVE_HEALTH_URL") or DEFAULT_URL
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError("it must be http://HOST[:PORT]/PATH")
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_SECONDS)
        connection.request("GET", parts.path or "/")
        status = connection.getresponse().status
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"healthcheck: NEOSERVE_HEALTH_URL {url}: {error or type(error).__name__}")
        return 1
    if status != http.client.OK:
        print(f"healthcheck: {url} answers {status}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
