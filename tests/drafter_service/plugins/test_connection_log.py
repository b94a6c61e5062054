from drafter_service.plugins.connection_log import ConnectionLog

ADDRESS = "unix:/run/ssd.sock"


def test_a_loss_of_several_connections_is_reported_once_and_so_is_its_end():
    reports = []
    log = ConnectionLog(ADDRESS, reports.append)
    for connection in "abc":
        log.lost(connection, "it ended the stream")
    (lost,) = reports
    assert lost == f"no connection to the drafter at {ADDRESS} (it ended the stream); continuing without drafts"
    log.closed("c")
    log.resumed("a")
    assert len(reports) == 1
    log.resumed("b")
    assert reports[1] == f"reconnected to the drafter at {ADDRESS}; drafting resumes"
    log.lost("a", "it ended the stream")
    assert len(reports) == 3


def test_a_refused_connection_hides_no_other_loss():
    reports = []
    log = ConnectionLog(ADDRESS, reports.append)
    log.lost("a", "no permission")
    log.lost("b", "it ended the stream")
    log.resumed("b")
    assert [report.split("(")[-1] for report in reports] == [
        "no permission); continuing without drafts",
        "it ended the stream); continuing without drafts",
        f"reconnected to the drafter at {ADDRESS}; drafting resumes",
    ]
