"""`StorePolicy`: how a store behind a network is reached, and `Place`: where in it a checkpoint is."""

import os
from typing import Any, Literal, TypeAlias, get_args

import attrs

from functional_ckpt.errors import PolicyError
from functional_ckpt.plan.field import as_int, as_number, at_least, flag, one_of, refuse, seconds

__all__ = ["SCHEMES", "Place", "StorePolicy"]

Credentials: TypeAlias = Literal["auto", "environment", "anonymous"]

#: URL schemes of the stores behind a network that TensorStore has a driver for.
SCHEMES = ("s3", "gs", "http", "https")


def _text_or_none(policy: Any, field: Any, value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise refuse(policy, field.name, "text, or None for what the environment says", value)


@attrs.frozen(kw_only=True)
class StorePolicy:
    """How to reach an object store; file systems ignore it.

    Parameters
    ----------
    endpoint
        URL of the server; None for ``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL``, else Amazon's own.
    region
        None for ``AWS_REGION`` or ``AWS_DEFAULT_REGION``; where there is an endpoint, else ``us-east-1``.
    credentials
        ``"environment"`` (``AWS_ACCESS_KEY_ID`` and the like), ``"anonymous"``, or ``"auto"``: those of the environment
        if it has any, else what Amazon's tools find: profiles, and the role of the machine.
    retries
        How often a request that was throttled or cut off is sent again, with growing waits in between.
    retry_delay_s
        The first of these waits, in seconds; each is twice the one before, up to 8 s.
    timeout_s
        Longest time for one request with all its retries, in seconds.
    concurrency
        Requests at a time, on each rank; what they hold in memory keeps to the policy's `budget_nbytes`.
    lease_s
        How long a claim counts after its saver was last heard of, in seconds. A live saver renews it three times as
        often.
    alone
        No other save to the path can run at the same time, and no sweep runs there meanwhile. Set it to
        use a server that ignores the condition of a write.

    Raises
    ------
    PolicyError
        For a field of another type, or a value that is not listed above.

    Examples
    --------
    >>> StorePolicy(concurrency=8).concurrency
    8
    """

    endpoint: str | None = attrs.field(default=None, validator=_text_or_none)
    region: str | None = attrs.field(default=None, validator=_text_or_none)
    credentials: Credentials = attrs.field(default="auto", validator=one_of(*get_args(Credentials)))
    retries: int = attrs.field(default=8, converter=as_int, validator=at_least(0))
    retry_delay_s: float = attrs.field(default=0.25, converter=as_number, validator=seconds)
    timeout_s: float = attrs.field(default=300.0, converter=as_number, validator=seconds)
    concurrency: int = attrs.field(default=32, converter=as_int, validator=at_least(1))
    lease_s: float = attrs.field(default=60.0, converter=as_number, validator=seconds)
    alone: bool = attrs.field(default=False, validator=flag)

    @property
    def endpoint_url(self) -> str | None:
        """The server's URL, from the policy or the environment; None for Amazon's own."""
        return self.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")

    @property
    def aws_region(self) -> str | None:
        """The region, from the policy or the environment; None to ask the server."""
        found = self.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return found or ("us-east-1" if self.endpoint_url else None)

    @property
    def credentials_type(self) -> str:
        """What TensorStore calls these credentials."""
        if self.credentials != "auto":
            return self.credentials
        return "environment" if os.environ.get("AWS_ACCESS_KEY_ID") else "default"


@attrs.frozen
class Place:
    """A bucket or host, and a prefix in it that ends with a slash or is empty.

    Examples
    --------
    >>> Place.of("s3", "bucket/run/step-1/").prefix
    'run/step-1/'
    """

    scheme: str
    bucket: str
    prefix: str

    @classmethod
    def of(cls, scheme: str, rest: str) -> "Place":
        """Return the place that a URL names after its ``://``.

        Raises
        ------
        PolicyError
            If it names no bucket, or has a part that servers read in different ways.
        """
        bucket, _, prefix = rest.partition("/")
        prefix = prefix.strip("/")
        parts = prefix.split("/") if prefix else []
        if not bucket or any(part in ("", ".", "..") for part in parts):
            raise PolicyError(
                "this URL names no place in an object store",
                expected=f"{scheme}://bucket/prefix",
                found=f"{scheme}://{rest}",
                remedy="Name a bucket, and no part that is empty, . or ..",
            )
        return cls(scheme, bucket, f"{prefix}/" if prefix else "")

    @property
    def url(self) -> str:
        """The place as a URL, without a slash at the end."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def spec(self, policy: StorePolicy) -> dict[str, Any]:
        """Return TensorStore's description of the key-value store here."""
        if self.scheme == "gs":
            return {"driver": "gcs", "bucket": self.bucket, "path": self.prefix}
        if self.scheme != "s3":
            return {"driver": "http", "base_url": f"{self.scheme}://{self.bucket}", "path": f"/{self.prefix}"}
        spec: dict[str, Any] = {"driver": "s3", "bucket": self.bucket, "path": self.prefix}
        # One request, in which the server checks the condition, instead of a read and then a write.
        spec["use_conditional_write"] = True
        if policy.endpoint_url:
            spec["endpoint"] = policy.endpoint_url
        if policy.aws_region:
            spec["aws_region"] = policy.aws_region
        return spec
