"""Uvicorn's HTTP protocol, with the one error shape also for requests too malformed to reach an app."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import BadRequestError, error_body


class JsonErrorsProtocol(HttpToolsProtocol):
    """Unparsable or ambiguous framing (Content-Length beside Transfer-Encoding) is 400 JSON, connection closed."""

    def send_400_response(self, msg: str) -> None:
        body = error_body(BadRequestError("the request is not valid HTTP/1.1", code="invalid_http"))
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()
