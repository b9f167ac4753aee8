"""What each key may have by its own limits: requests at once, requests and tokens a minute. Whatever the model."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from gateway.accountbook import AccountBook, LocalBook
from gateway.errors import GatewayError, OverloadedError
from gateway.keys import Tenant
from gateway.limits import Allowance
from gateway.metrics import Metrics
from gateway.wording import several


class Charge:
    """One request at its key's expense, held with `with`. `used_tokens`: what it came to; None leaves the estimate
    standing."""

    __slots__ = ("_accounts", "_limited", "_tenant", "_tokens", "used_tokens")

    def __init__(self, accounts: "Accounts", tenant: Tenant, tokens: int) -> None:
        self.used_tokens: int | None = None
        self._accounts = accounts
        self._tenant = tenant
        self._tokens = tokens

    def __enter__(self) -> Self:
        self._limited = self._accounts._take(self._tenant, self._tokens)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._limited:
            return
        used_tokens = 0 if isinstance(error, GatewayError) else self.used_tokens
        self._accounts._settle(self._tenant, self._tokens, used_tokens, isinstance(error, OverloadedError))


class Accounts:
    """Keeper of the accounts: one for each tenant that has limits."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float], book: AccountBook | None = None) -> None:
        self._metrics = metrics
        self._clock = clock
        self._book = LocalBook() if book is None else book

    def __repr__(self) -> str:
        return f"<Accounts {self._book.in_flight()} in-flight>"

    def charge(self, tenant: Tenant, tokens: int) -> Charge:
        """Hold a client's request against its key's own limits, whether it takes an engine call or shares another's.

        Entering raises OverloadedError. A request refused later costs nothing; one that got no answer, no tokens.
        """
        return Charge(self, tenant, tokens)

    def check_integrity(self) -> None:
        assert self._book.in_flight() >= 0, self

    def _take(self, tenant: Tenant, tokens: int) -> bool:
        """Take what the key's own limits allow; False where it has none. Raises OverloadedError."""
        if tenant.concurrent is None and tenant.requests_per_minute is None and tenant.tokens_per_minute is None:
            return False
        now = self._clock()
        with self._book.account(tenant.name) as account:
            if tenant.concurrent is not None and account.in_flight >= tenant.concurrent:
                allowed = several(tenant.concurrent, "request")
                raise self._refusal("key_concurrency", tenant, f"this key may have {allowed} at once", 1.0)
            if (per_minute := tenant.requests_per_minute) is not None:
                account.requests = requests = _allowance(account.requests, per_minute, now)
                if wait_s := requests.take(1, now):
                    detail = f"this key may send {several(per_minute, 'request')} a minute"
                    raise self._refusal("key_requests", tenant, detail, wait_s)
            if (per_minute := tenant.tokens_per_minute) is not None:
                account.tokens = allowance = _allowance(account.tokens, per_minute, now)
                if wait_s := allowance.take(tokens, now):
                    if tenant.requests_per_minute is not None and account.requests is not None:
                        account.requests.give_back(1)
                    detail = f"this key may use {several(per_minute, 'token')} a minute"
                    raise self._refusal("key_tokens", tenant, detail, wait_s)
            account.in_flight += 1
        return True

    def _settle(self, tenant: Tenant, tokens: int, used_tokens: int | None, shed: bool) -> None:
        with self._book.account(tenant.name) as account:
            account.in_flight -= 1
            if shed and tenant.requests_per_minute is not None and account.requests is not None:
                account.requests.give_back(1)
            if used_tokens is not None and tenant.tokens_per_minute is not None and account.tokens is not None:
                account.tokens.give_back(tokens - used_tokens)

    def _refusal(self, cause: str, tenant: Tenant, detail: str, retry_after_s: float) -> OverloadedError:
        self._metrics.shed.labels(cause, tenant.name).inc()
        return OverloadedError(f"overloaded: {detail}", cause=cause, retry_after_s=retry_after_s)


def _allowance(current: Allowance | None, per_minute: int, now: float) -> Allowance:
    """What is left of the minute. Where the limit is another than before, what was used stays used: keys of one name
    may have different limits while one replaces the other, and must not fill each other's allowance anew."""
    if current is None:
        return Allowance.full(per_minute, now)
    return current.under(per_minute)
