"""The data plane: client side, engine side, and the life of one request between them.

    server         the listening socket, and all connections of clients
    balanced       the same, where load balancers say whose connection they pass on
    proxy_header   how they say it (pure)
    connection     one of them: requests in, in order; responses out; patience
    client         one request of a client, and its response
    request_reader, response_reader    bytes -> requests, responses (on llhttp); no I/O
    response_head  status and headers -> bytes
    engine         requests to workers; connections that are kept
    engine_connection    one of them: how far a response is, and who takes its pieces
    door           what a request wants
    exchange       the life of a request: place, send, relay, retry
    attempt        one placement, settled once

Bytes of a response take the shortest way: the engine's connection calls the exchange, which writes
to the client's connection and looks at what it wrote. No task wakes for a piece.
"""
