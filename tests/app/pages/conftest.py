"""What tests of pages share."""

from tests.browsing import browser as browser
