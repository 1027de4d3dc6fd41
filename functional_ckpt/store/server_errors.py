"""What the errors of an object store mean, and what to do about them."""

import re

from functional_ckpt.errors import StorageError

__all__ = ["explained", "knows_no_condition"]

# What a part of TensorStore's text means, and what to do about it; the first that is found counts.
_MEANINGS = (
    (r"NoSuchBucket|bucket does not exist|Invalid S3 bucket name|Bucket .* (not found|does not exist)",
     "Check the bucket's name, the region and the endpoint"),
    (r"ExpiredToken|token .*expired|TokenRefreshRequired", "Renew the credentials"),
    (r"SignatureDoesNotMatch|InvalidAccessKeyId|RequestTimeTooSkewed|UNAUTHENTICATED|credentials",
     "Check the credentials and the clock of this machine"),
    (r"PermanentRedirect|AuthorizationHeaderMalformed|aws_region|requires .*region|'30[17]'",
     "Check the region: pass StorePolicy(region=...) or set AWS_REGION"),
    (r"PERMISSION_DENIED|AccessDenied|\"code\": 40[13]|'40[13]'",
     "Check the credentials, whether they have expired, and what they allow here"),
    # An answer to HEAD says no more; Amazon answers so to a wrong region and to a token that has expired.
    (r"'400'", "Check the region (StorePolicy(region=...) or AWS_REGION), and whether the credentials have expired"),
    (r"SlowDown|'503'|'429'", "The store throttles: pass a StorePolicy with a lower concurrency or more retries"),
    (r"CURL error|UNAVAILABLE|DEADLINE_EXCEEDED|'50\d'|ABORTED", "Check the endpoint and the network, or pass a "
     "StorePolicy with more retries"),
)  # fmt: skip


def explained(what: str, path: str, text: str) -> StorageError:
    """Return the error for a text of TensorStore, with what to do about it.

    Examples
    --------
    >>> explained("reading", "s3://b/c.0", "SlowDown").remedy
    'The store throttles: pass a StorePolicy with a lower concurrency or more retries'
    """
    remedy = next((remedy for pattern, remedy in _MEANINGS if re.search(pattern, text, re.IGNORECASE)), None)
    return StorageError(f"{what} failed", path=path, found=_short(text), remedy=remedy)


def _short(text: str) -> str:
    """Return a text of TensorStore without the bodies and headers of answers, which can be long and hold tokens.

    Examples
    --------
    >>> _short("NOT_FOUND: NoSuchBucket: none such [http_response_body='<xml>'] [source locations='a']")
    'NOT_FOUND: NoSuchBucket: none such'
    """
    status = re.search(r"http_response_code='(\d+)'", text)
    cut = re.split(r" \[[a-z_ -]+=", text, maxsplit=1)[0]
    return f"{cut} (HTTP {status[1]})" if status and "Unknown" in cut else cut


def knows_no_condition(error: StorageError) -> bool:
    """Tell whether the server does not implement conditional writes."""
    return isinstance(error.__cause__, NotImplementedError)  # TensorStore's word for status 501, and for no other
