"""Opens a connection, or says in one line why it cannot."""

from __future__ import annotations

import os
from collections.abc import Sequence

import glide_sync as glide

from kvgraft import ConfigError
from kvgraft_valkey.connection import (
    AnyConnection,
    ClusterConnection,
    SingleConnection,
    milliseconds,
    one_line,
)
from kvgraft_valkey.options import Server, ValkeyOptions

__all__ = ["connect"]

RETRIES = glide.BackoffStrategy(num_of_retries=3, factor=50, exponent_base=2, jitter_percent=20)
"""Attempts to reach a server: three at opening, with waits of up to 50 ms x 2^3. A lost server is
tried again without end, at the longest wait.
"""


def connect(servers: Sequence[Server], options: ValkeyOptions) -> AnyConnection:
    """A connection to a server or a cluster.

    Raises:
        ConfigError: it cannot be reached, refuses the log-in, or contradicts `cluster`.
    """
    glide.Logger.init(glide.LogLevel.ERROR)  # unless the application has configured logging
    if options.cluster:
        return _cluster(servers, options)
    where = ", ".join(map(str, servers))
    if len(servers) > 1:
        raise ConfigError(f"storage 'valkey': {where} are several servers; add cluster=true")
    try:
        client = glide.GlideClient.create(_single_configuration(servers, options))
    except glide.GlideError as error:
        raise _unreachable(where, options, error) from error
    connection = SingleConnection(client, where)
    try:
        if _is_cluster(connection):
            raise ConfigError(f"storage 'valkey': {where} is part of a cluster; add cluster=true")
    except BaseException:
        connection.close()
        raise
    return connection


def _cluster(servers: Sequence[Server], options: ValkeyOptions) -> ClusterConnection:
    where = ", ".join(map(str, servers))
    try:
        client = glide.GlideClusterClient.create(_cluster_configuration(servers, options))
    except glide.GlideError as error:
        alone = next((each for each in servers if _answers_alone(each, options)), None)
        if alone is not None:
            raise ConfigError(
                f"storage 'valkey': {alone} is no cluster; leave out cluster=true"
            ) from error
        raise _unreachable(where, options, error) from error
    return ClusterConnection(client, where)


def _answers_alone(server: Server, options: ValkeyOptions) -> bool:
    """Whether the server is there and is not part of a cluster."""
    try:
        client = glide.GlideClient.create(_single_configuration([server], options))
    except glide.GlideError:
        return False
    connection = SingleConnection(client, str(server))
    try:
        return not _is_cluster(connection)
    except OSError:
        return False
    finally:
        connection.close()


def _is_cluster(connection: SingleConnection) -> bool:
    return connection.info()[0].get("cluster_enabled") == "1"


def _unreachable(where: str, options: ValkeyOptions, error: glide.GlideError) -> ConfigError:
    said = one_line(error)
    if "NOAUTH" in said:
        told, advice = "asks for a password", "give password_env=VARIABLE"
    elif "WRONGPASS" in said:
        told = f"refuses user {options.username or 'default'!r} and the password in "
        told += f"${options.password_env}"
        advice = "correct them"
    else:
        told = f"cannot be reached: {said}"
        advice = "see that it runs and that address and tls are right"
    return ConfigError(f"storage 'valkey': {where} {told}; {advice}")


def _single_configuration(
    servers: Sequence[Server], options: ValkeyOptions
) -> glide.GlideClientConfiguration:
    return glide.GlideClientConfiguration(
        [glide.NodeAddress(*server) for server in servers],
        use_tls=options.tls,
        credentials=_credentials(options),
        request_timeout=milliseconds(options.timeout_s),
        reconnect_strategy=RETRIES,
        database_id=options.database,
        client_name="kvgraft",
        advanced_config=glide.AdvancedGlideClientConfiguration(
            connection_timeout=milliseconds(options.connect_timeout_s), tls_config=_tls(options)
        ),
    )


def _cluster_configuration(
    servers: Sequence[Server], options: ValkeyOptions
) -> glide.GlideClusterClientConfiguration:
    return glide.GlideClusterClientConfiguration(
        [glide.NodeAddress(*server) for server in servers],
        use_tls=options.tls,
        credentials=_credentials(options),
        request_timeout=milliseconds(options.timeout_s),
        reconnect_strategy=RETRIES,
        client_name="kvgraft",
        advanced_config=glide.AdvancedGlideClusterClientConfiguration(
            connection_timeout=milliseconds(options.connect_timeout_s), tls_config=_tls(options)
        ),
    )


def _credentials(options: ValkeyOptions) -> glide.ServerCredentials | None:
    if options.password_env is None:
        return None
    password = os.environ.get(options.password_env)
    if not password:
        raise ConfigError(
            f"storage 'valkey': option password_env={options.password_env!r}: there is no such "
            "environment variable, or it is empty; set it to the password"
        )
    return glide.ServerCredentials(password, options.username)


def _tls(options: ValkeyOptions) -> glide.TlsAdvancedConfiguration | None:
    if options.tls_ca is None:
        return None
    return glide.TlsAdvancedConfiguration(root_pem_cacerts=options.tls_ca.read_bytes())
