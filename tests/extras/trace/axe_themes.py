"""A check with axe-core of how accessible a page is, in both themes. A page begins in the light one."""


def check_both_themes(page, width):
    """Fail if axe finds a violation, or if something runs over the side of a page of this width."""
    from axe_playwright_python.sync_playwright import Axe

    page.add_style_tag(content=".card, .scroll { content-visibility: visible !important; }")
    for theme in ("light", "dark"):
        page.locator(f":root[data-theme={theme}]").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = Axe().run(page, options={"rules": {"target-size": {"enabled": True}}}).response
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]] == []
        page.keyboard.press("d")
